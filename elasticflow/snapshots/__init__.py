"""Snapshots as files: manifest, catalog, policies, the writer process."""
