"""What the processes of a launch agree on: messages, control store, addresses, environment, records. No torch."""
