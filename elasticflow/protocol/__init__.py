"""The conventions between the processes of a launch: messages, control store, addresses, environment, records. No torch."""
