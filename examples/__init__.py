"""What the job files in jobs/ train: ordinary PyTorch code that knows nothing of elasticflow."""
