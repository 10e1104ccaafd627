"""The tables of the job file, one pydantic model each."""
