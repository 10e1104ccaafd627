"""Job files as texts: read, laid over each other, every key with its place (floor 1)."""
