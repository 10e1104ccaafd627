"""`elasticflow lint`: finds faults of training scripts under a kill, a restart or a resize."""
