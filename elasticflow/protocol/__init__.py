"""What the processes of a launch agree on: environment, addresses, keys, records. No torch."""
