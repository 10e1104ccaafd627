"""Bytes and names of a snapshot; pure."""
