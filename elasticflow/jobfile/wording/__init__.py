"""Messages about the tables of a job file: pydantic's errors, unknown keys, names of other tools."""
