"""Diagnostics of job files: code, place, excerpt, help, and their formats."""
