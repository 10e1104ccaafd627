"""Snapshots in the worker: when they are due, this rank's part of each, and resuming from one."""
