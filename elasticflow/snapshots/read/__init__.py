"""Snapshots read back, every byte that is used verified."""
