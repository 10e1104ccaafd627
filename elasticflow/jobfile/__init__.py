"""A job file as declared: read, checked, explained; never runs anything of the job."""
