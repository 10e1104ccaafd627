"""`--deep`: the job's own code tried out in a child process; nothing is launched."""
