"""What differs between two launches of a run, and how much it matters."""
