"""Whether all ranks are still equal."""
