"""Memory that the processes of a node share: staging buffers and the memory tier."""
