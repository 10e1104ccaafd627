"""Job files and example code for a beginning."""
