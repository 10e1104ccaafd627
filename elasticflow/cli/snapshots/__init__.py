"""Commands for the snapshots of a run."""
