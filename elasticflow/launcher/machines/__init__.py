"""A run on the hosts of a file: each is started by ssh, and again when it was away."""
