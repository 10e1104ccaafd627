"""What the job files in jobs/ train, and the examples of `init --example`: PyTorch code that knows nothing of elasticflow."""
