"""Events and figures of a run as lines for a person."""
