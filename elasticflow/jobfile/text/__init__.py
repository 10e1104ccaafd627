"""Job files as texts: TOML read, files and `--set` laid over each other, every key with its place."""
