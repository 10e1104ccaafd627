"""The code inside workers: the generated train.py imports it."""
