"""The rules of `elasticflow lint`: one module per concept, one function per code."""
