"""One module per command: parse, call one function, return an exit code."""
