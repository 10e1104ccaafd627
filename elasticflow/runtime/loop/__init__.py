"""The runtime as a training script of one's own calls it: `elasticflow.join` and what it returns."""
