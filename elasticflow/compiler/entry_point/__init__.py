"""Job -> train.py: the template filled in with the job's values."""
