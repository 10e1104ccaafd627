"""Reads run folders for status, console lines, logs and lists of snapshots."""
