"""The model's side of training: checks and settings before it, and modes during it."""
