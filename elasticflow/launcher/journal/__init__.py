"""What a launch writes down: events, state, metrics, durations, how the launch before ended."""
