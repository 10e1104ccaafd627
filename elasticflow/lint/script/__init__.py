"""A training script read as text: its options, the ranks that run a statement, the origin of a value."""
