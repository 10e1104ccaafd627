"""A job as objects of Kubernetes."""
