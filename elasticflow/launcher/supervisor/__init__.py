"""The supervisor, which leads a launch: generations, nodes, journal, verdict."""
