"""`--deep` tries out the job's own code in a child process; no run is launched."""
