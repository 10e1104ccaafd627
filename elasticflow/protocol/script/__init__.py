"""What a job's own script is told: what is run, and what the job file says to its loop."""
