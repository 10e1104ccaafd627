"""Commands for clusters: render, submit."""
