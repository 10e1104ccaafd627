"""Checks that need several tables at once: closed forms over the whole node range."""
