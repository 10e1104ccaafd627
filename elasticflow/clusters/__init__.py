"""Turns a job into the text that a cluster's scheduler accepts."""
