"""Checks whether this machine can run jobs, or one job."""
