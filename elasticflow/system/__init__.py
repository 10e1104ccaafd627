"""The operating system as every process of a run uses it: files, records, JSON lines, processes. No torch."""
