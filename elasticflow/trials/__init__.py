"""Short runs of a job under faults or at several world sizes, and their comparison."""
