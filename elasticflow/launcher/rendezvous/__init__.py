"""Where the processes of a launch meet: store, keys, rounds, invitations."""
