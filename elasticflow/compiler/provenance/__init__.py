"""The origins of a launch (job, sources, packages, machine), and the differences from the launch before."""
