"""Functions of the job that are called at moments of its training: what they are given, and what they may not change."""
