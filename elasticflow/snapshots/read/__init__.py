"""Snapshots read back, every byte verified."""
