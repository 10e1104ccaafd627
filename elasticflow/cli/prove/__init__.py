"""Commands that prove that a job survives."""
