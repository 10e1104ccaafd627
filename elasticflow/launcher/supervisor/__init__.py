"""The head of a launch: generations, members, budget, journal, verdict."""
