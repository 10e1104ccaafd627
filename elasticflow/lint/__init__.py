"""`elasticflow lint`: training scripts read for what goes wrong when they are killed, restarted or resized."""
