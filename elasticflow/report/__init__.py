"""One HTML file about a run, or about several: no network, no script of others."""
