"""What is wrong with a job file: code, place, excerpt, help, and the formats of all that."""
