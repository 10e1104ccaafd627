"""Where else metrics and events go: readers of the run folder in a process of their own, one sink each."""
