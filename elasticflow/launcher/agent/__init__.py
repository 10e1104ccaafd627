"""A node's side of a launch: agent, fork server, workers, their heartbeats and logs."""
