"""Losses."""


def weighted(outputs, targets, weight=1.0):
    """Return a loss."""


def own_step(model, batch, optimizers):
    """Move the optimizers."""
    optimizers["g"].step()
    return 0.0
