"""Sinks send a run's metrics and events elsewhere: a separate process reads the run folder, with one thread for each."""
