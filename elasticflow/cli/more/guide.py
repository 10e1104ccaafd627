"""`elasticflow guide [TOPIC]`: the pages of the guide, what a code means, finished scripts, JSON Schemas."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import FILE_ONLY, TOPIC
from elasticflow.errors import ANSWER_IS_NO, FINISHED
from elasticflow.lint.rungs import TEMPLATES

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.codes import Explanation

_WIDEST = 100
# A topic beside the pages.
_ALL_CODES = "codes"


@click.command("guide")
@click.argument("topic", metavar="[TOPIC|CODE|NAME]", type=TOPIC, required=False)
@click.option("--search", "word", metavar="WORD", help="List the lines of all pages with WORD in them.")
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    help="Print a finished script with elasticflow.join: the example of this form of loop.",
)
@click.option(
    "--schema",
    type=click.Choice(["job", "events"]),
    help="Print the JSON Schema (2020-12) of the job file, or of the lines that a run writes.",
)
@click.option("-o", "--output", type=FILE_ONLY, help="With --template and --schema: write to a file instead.")
def command(
    topic: str | None, word: str | None, template: str | None, schema: str | None, output: Path | None
) -> int:
    """Show the guide's page about TOPIC; without one, list the topics.

    A terminal shows the page formatted, through a pager if it is longer than the screen; otherwise the command prints
    the Markdown source. CODE, such as EF101, is explained with a bad and a good example. NAME is a name of torchrun,
    Lightning, Hugging Face, Accelerate or torchtitan: the command says what it is called in a job file.

    With its schema, editors that support TOML complete, explain and check the keys of a job file whose first line is
    `#:schema job.schema.json`.

    \b
    elasticflow guide restarts
    elasticflow guide --search budget
    elasticflow guide EF101                                what this code means
    elasticflow guide codes                                all codes
    elasticflow guide num_train_epochs                     the key of the job file
    elasticflow guide --template accelerate
    elasticflow guide --schema job -o jobs/job.schema.json
    """
    if template is not None or schema is not None:
        if topic is not None or word is not None or (template is not None and schema is not None):
            raise click.UsageError("--template and --schema print a file, and go with nothing but --output")
        from elasticflow.cli.output import write_file
        from elasticflow.scaffold import gallery

        text = _schema(schema) if template is None else gallery.text_of_file(TEMPLATES[template])
        if output is None:
            click.echo(text, nl=False)
        else:
            write_file(output, text)
        return FINISHED
    if output is not None:
        raise click.UsageError("--output goes with --template or --schema")
    from elasticflow.guide import pages

    about = pages.topics()
    if word is not None:
        if topic is not None and topic not in about:
            raise click.BadParameter(
                f'there is no page "{topic}"; `elasticflow guide` lists the topics', param_hint="TOPIC"
            )
        return _search(word, topic)
    if topic is None:
        _list(about)
    elif topic not in about:
        _explain(topic, list(about))
    elif sys.stdout.isatty():
        _show(pages.for_terminal(pages.text_of(topic)))
    else:
        click.echo(pages.text_of(topic), nl=False)
    return FINISHED


def _schema(kind: str | None) -> str:
    from elasticflow.cli.more.events_schema import events_schema
    from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE

    return SCHEMA_FILE.read_text("utf-8") if kind == "job" else f"{json.dumps(events_schema(), indent=1)}\n"


def _explain(name: str, topics: list[str]) -> None:
    from elasticflow.cli.output import paint
    from elasticflow.jobfile.diagnostics.codes import explanation_of, titles

    near = difflib.get_close_matches(name.lower(), topics, n=3, cutoff=0.5)
    if name == _ALL_CODES:
        for code, title in titles().items():
            click.echo(f"{paint(code, bold=True)}  {title}")
    elif explanation := explanation_of(name.upper()):
        _print_explanation(name.upper(), explanation)
    elif meaning := _meaning(name):
        click.echo(
            meaning + "".join(f"\na page of the guide: elasticflow guide {topic}" for topic in near[:1])
        )
    elif re.fullmatch(r"(EF)?[0-9]+", name.upper()):
        raise click.BadParameter(
            f'there is no code "{name}"; `elasticflow guide codes` lists them', param_hint="CODE"
        )
    else:
        hint = f"did you mean {' or '.join(near)}?" if near else "`elasticflow guide` lists the topics"
        raise click.BadParameter(
            f'there is no topic, code or name of another tool "{name}"; {hint}', param_hint="TOPIC"
        )


def _print_explanation(code: str, explanation: Explanation) -> None:
    from elasticflow.cli.output import paint

    heading = paint(f"{code}: {explanation.title}", bold=True)
    click.echo(f"{heading}\n\n{textwrap.fill(explanation.reason, 96)}")
    for label, example, colour in (("Bad:", explanation.bad, "red"), ("Good:", explanation.good, "green")):
        click.echo(f"\n{paint(label, colour, bold=True)}\n{textwrap.indent(example, '    ')}")


def _meaning(name: str) -> str | None:
    """Return the job file's counterpart of another tool's name; None for an unknown name."""
    from elasticflow.jobfile.wording.foreign_names import meaning_of

    meaning = meaning_of(name)
    if meaning is None:
        return None
    note = meaning.note.replace("{}", "...")
    if not meaning.key:
        return f"{name}: {note}"
    return f"{name} is {meaning.key} in a job file{f' ({note})' if note else ''}"


def _list(about: dict[str, str]) -> None:
    from elasticflow.cli.output import paint

    width = max(map(len, about))
    for topic, line in about.items():
        click.echo(f"{paint(topic.ljust(width), bold=True)}  {line}")
    click.echo(
        "\n`elasticflow guide TOPIC` shows one, `elasticflow guide --search WORD` finds a word in all,\n"
        "`elasticflow guide EF101` explains a code, and `elasticflow guide codes` lists the codes."
    )


def _search(word: str, topic: str | None) -> int:
    """List the lines with *word*, of one topic or of all; exit code 1 if there is none."""
    from elasticflow.cli.output import paint
    from elasticflow.guide import pages

    place = None
    for hit in pages.search(word):
        if topic is not None and hit.topic != topic:
            continue
        if place != (hit.topic, hit.section):
            place = (hit.topic, hit.section)
            click.echo(paint(f"{hit.topic}: {hit.section}", bold=True))
        click.echo(f"  {hit.line}")
    if place is None:
        click.echo(f'"{word}" stands in no page', err=True)
        return ANSWER_IS_NO
    return FINISHED


def _show(markdown: str) -> None:
    """Show a page formatted for the terminal, through a pager if it is longer than the screen."""
    from elasticflow.cli.output import as_laid_out

    columns, lines = shutil.get_terminal_size()
    text = as_laid_out(markdown, min(columns, _WIDEST))
    if text.count("\n") < lines:
        click.echo(text, nl=False)
    else:
        click.echo_via_pager(text, color=click.get_current_context().color)
