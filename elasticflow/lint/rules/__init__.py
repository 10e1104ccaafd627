"""What `elasticflow lint` looks for: one module per concept, one function per code."""
