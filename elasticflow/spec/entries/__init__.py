"""Entry points, checked by reading source, never importing it (floor 1)."""
