"""Requests for traces: from the run folder to the supervisor, and from there to the workers."""
