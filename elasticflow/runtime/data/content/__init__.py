"""What the samples of a dataset hold, as far as fingerprints and comparisons depend on it, and what they are drawn with."""
