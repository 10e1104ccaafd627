"""Losses."""


def weighted(outputs, targets, weight=1.0):
    """Return a loss."""
