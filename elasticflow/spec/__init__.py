"""The job as declared: files, positions, models, checks (floor 1)."""
