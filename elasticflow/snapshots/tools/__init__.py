"""Snapshot operations that people start by hand: export, prune."""
