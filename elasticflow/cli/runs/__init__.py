"""`elasticflow runs`: list, rm, prune."""
