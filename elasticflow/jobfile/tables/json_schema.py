"""JSON Schema of the job file, for editors and other tools; `tests/jobfile/tools/made_schema.py` makes it of the models."""

from __future__ import annotations

from pathlib import Path

SCHEMA_FILE = Path(__file__).with_name("job.schema.json")
