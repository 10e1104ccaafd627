"""What the generated train.py imports (runs inside workers)."""
