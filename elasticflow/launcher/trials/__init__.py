"""Short runs of a job under faults or at several world sizes, and the comparer (floor 3)."""
