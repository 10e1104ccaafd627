"""The worker process: its identity, process group, clock, log and random numbers; knows no data and no model."""
