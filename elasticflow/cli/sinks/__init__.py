"""`elasticflow sinks`: send."""
