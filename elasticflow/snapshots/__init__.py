"""Snapshots as files: manifest, catalog, policies, the writer process (floor 1, no torch)."""
