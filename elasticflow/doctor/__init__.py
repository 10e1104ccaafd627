"""Checks if this machine can run jobs, or a given job."""
