"""Orders of samples: the sample at each place of the endless stream."""
