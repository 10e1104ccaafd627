"""Processes: supervisor, agent, fork server, workers."""
