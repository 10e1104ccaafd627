"""Whether this machine can run jobs, or one job (floor 4.5)."""
