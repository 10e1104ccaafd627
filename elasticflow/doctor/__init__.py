"""Whether this machine can run jobs, or one job."""
