"""Processes: supervisor, agent, fork server, workers (floor 3)."""
