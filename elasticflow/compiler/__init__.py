"""Job in, launch folder out (floor 2)."""
