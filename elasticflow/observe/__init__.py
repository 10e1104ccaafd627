"""Reads run folders: status, console lines, reports."""
