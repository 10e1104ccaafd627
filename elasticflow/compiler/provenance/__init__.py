"""The origins of a launch (job, sources, packages, machine), and what differs from the launch before."""
