"""When a snapshot is taken, what this rank gives to it, and going on from one."""
