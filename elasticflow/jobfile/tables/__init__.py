"""The tables of the job file, one pydantic model each, and what is said of their keys."""
