"""Messages about the moments of a run, to a webhook or a command: the sink of `[notify]`."""
