"""Files of a launch: events, state, metrics, durations, and how the previous launch ended."""
