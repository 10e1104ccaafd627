"""`elasticflow schema`: the JSON Schema of the job file, or of the lines that a run writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import FILE_ONLY
from elasticflow.errors import FINISHED

if TYPE_CHECKING:
    from pathlib import Path


@click.command("schema")
@click.option("-o", "--output", type=FILE_ONLY, help="Write to a file instead.")
@click.option(
    "--events",
    "is_of_events",
    is_flag=True,
    help="The schema of events.jsonl, metrics.jsonl and logs, not of the job file.",
)
def command(output: Path | None, *, is_of_events: bool) -> int:
    """Print the JSON Schema (2020-12) of the job file, or with --events of the lines that a run writes.

    Editors that support TOML complete, explain and check the keys of a job file whose first line names the schema:

    \b
    elasticflow schema -o jobs/job.schema.json
    #:schema job.schema.json
    """
    from elasticflow.cli.more.events_schema import events_schema
    from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE

    text = f"{json.dumps(events_schema(), indent=1)}\n" if is_of_events else SCHEMA_FILE.read_text("utf-8")
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.BadParameter(
                f"cannot write {output}: {error.strerror}", param_hint="--output"
            ) from error
    return FINISHED
