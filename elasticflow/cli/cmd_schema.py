"""`elasticflow schema`: the JSON Schema of the job file (floor 5)."""

from __future__ import annotations

import json
from pathlib import Path

import click

from elasticflow.errors import FINISHED


@click.command("schema")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file instead."
)
def command(output: Path | None) -> int:
    """Print the JSON Schema (2020-12) of the job file.

    Editors that know TOML complete and check job files whose first line names it:

    \b
    elasticflow schema -o jobs/job.schema.json
    #:schema job.schema.json
    """
    from elasticflow.spec.schema import job_schema

    text = json.dumps(job_schema(), indent=2)
    if output is None:
        click.echo(text)
    else:
        try:
            output.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise click.BadParameter(
                f"cannot write {output}: {error.strerror}", param_hint="--output"
            ) from error
    return FINISHED
