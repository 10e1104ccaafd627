"""From a batch to gradients, and metrics."""
