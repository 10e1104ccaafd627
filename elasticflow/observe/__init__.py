"""Reads run folders: status, console lines, reports (floor 4)."""
