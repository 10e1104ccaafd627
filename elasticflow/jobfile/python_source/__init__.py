"""Python read as text: where a name is defined, what a call takes; nothing is imported."""
