"""The tables that say what of a job is written down, and where else that goes."""
