"""Turns a job into objects of Kubernetes."""
