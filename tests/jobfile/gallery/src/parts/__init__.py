"""A package in the folder src."""
