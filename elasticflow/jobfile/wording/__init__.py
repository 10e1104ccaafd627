"""What is said of the tables of a job file: pydantic's errors, unknown keys and values of other tools, in its words."""
