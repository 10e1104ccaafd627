"""The functions and classes that a job names, checked by reading source, never importing it."""
