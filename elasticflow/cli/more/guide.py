"""`elasticflow guide [TOPIC]`: the pages of the guide in the terminal."""

from __future__ import annotations

import difflib
import shutil
import sys

import click

from elasticflow.cli.parameters import TOPIC
from elasticflow.errors import ANSWER_IS_NO, FINISHED
from elasticflow.lint.rungs import TEMPLATES

_WIDEST = 100


@click.command("guide")
@click.argument("topic", type=TOPIC, required=False)
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    help="Print a finished script with elasticflow.join: the example of this form of loop.",
)
@click.option("--search", "word", metavar="WORD", help="List the lines of all pages with WORD in them.")
def command(topic: str | None, template: str | None, word: str | None) -> int:
    """Show the guide's page about TOPIC; without one, list the topics.

    A terminal shows the page formatted, through a pager if it is longer than the screen; otherwise the command prints
    the Markdown source.

    \b
    elasticflow guide
    elasticflow guide restarts
    elasticflow guide --search budget
    elasticflow guide --template accelerate
    """
    if template is not None:
        return _print_template(template, is_alone=topic is None and word is None)
    from elasticflow.guide import pages

    about = pages.topics()
    if topic is not None and topic not in about:
        near = difflib.get_close_matches(topic.lower(), about, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`elasticflow guide` lists the topics"
        raise click.BadParameter(f'there is no topic "{topic}"; {hint}', param_hint="TOPIC")
    if word is not None:
        return _search(word, topic)
    if topic is None:
        _list(about)
    elif sys.stdout.isatty():
        _show(pages.for_terminal(pages.text_of(topic)))
    else:
        click.echo(pages.text_of(topic), nl=False)
    return FINISHED


def _print_template(name: str, *, is_alone: bool) -> int:
    """Print an example's script as it is.

    Raises:
        click.UsageError: a topic or a word was given too.
    """
    from elasticflow.scaffold.gallery import text_of_file

    if not is_alone:
        raise click.UsageError("--template prints a script, and goes with no TOPIC or --search")
    click.echo(text_of_file(TEMPLATES[name]), nl=False)
    return FINISHED


def _list(about: dict[str, str]) -> None:
    from elasticflow.cli.output import paint

    width = max(map(len, about))
    for topic, line in about.items():
        click.echo(f"{paint(topic.ljust(width), bold=True)}  {line}")
    click.echo(
        "\n`elasticflow guide TOPIC` shows one, `elasticflow guide --search WORD` finds a word in all."
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
