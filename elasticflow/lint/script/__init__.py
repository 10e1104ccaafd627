"""A training script read as text: what its names stand for, who runs its statements, what its values come from."""
