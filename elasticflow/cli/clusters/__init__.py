"""Commands for clusters: render."""
