"""Values and entry points of a job against what Python source says: annotations, signatures, base classes."""
