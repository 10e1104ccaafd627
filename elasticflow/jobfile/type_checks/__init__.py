"""Checks values and entry points of a job against Python source: annotations, signatures, base classes."""
