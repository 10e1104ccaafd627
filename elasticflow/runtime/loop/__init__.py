"""The runtime as a script with its own training loop calls it: `elasticflow.join` and the run that it returns."""
