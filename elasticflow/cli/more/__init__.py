"""All other commands."""
