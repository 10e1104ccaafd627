"""A script for torchrun as it is, and the job file that runs it."""
