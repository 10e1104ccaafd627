"""Job files and example code for a beginning (floor 2)."""
