"""The snapshot writer of a node: `python -m elasticflow.snapshots.writer.main`; never imports torch."""
