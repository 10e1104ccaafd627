"""The child process of `validate --deep`."""
