"""Turns a job into a batch script of Slurm, and calls Slurm's commands."""
