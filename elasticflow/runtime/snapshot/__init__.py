"""When a snapshot is taken, what this rank gives to it, and resuming from one."""
