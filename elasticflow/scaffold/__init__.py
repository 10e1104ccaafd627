"""Job files and example code for new projects."""
