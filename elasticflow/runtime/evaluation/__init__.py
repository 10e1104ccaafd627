"""Evaluations: means over batches, values over the whole set in the order of its samples, and when to stop."""
