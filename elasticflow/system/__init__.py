"""The operating system as every process of a run uses it: files, records, processes. No torch."""
