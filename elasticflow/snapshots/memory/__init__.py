"""Memory that the processes of a node share, and what of a snapshot lies there."""
