"""Job in, launch folder out."""
