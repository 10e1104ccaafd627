"""`elasticflow sinks`: send, test."""
