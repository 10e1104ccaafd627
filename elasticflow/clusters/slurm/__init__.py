"""A job as a batch script of Slurm, and Slurm's own commands."""
