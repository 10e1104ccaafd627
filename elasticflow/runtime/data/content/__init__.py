"""Contents of samples, as far as fingerprints and comparisons need them, and the generators that draw them."""
