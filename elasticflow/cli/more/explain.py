"""`elasticflow explain CODE`: the meaning of a code, or of another tool's name."""

from __future__ import annotations

import re
import textwrap

import click

from elasticflow.cli.parameters import CODE
from elasticflow.errors import FINISHED


@click.command("explain")
@click.argument("code", type=CODE, required=False)
def command(code: str | None) -> int:
    """Explain CODE, such as EF101, with a bad and a good example; without one, list all codes.

    CODE may also be a name of torchrun, Lightning, Hugging Face, Accelerate or torchtitan; the command then names the
    matching key of the job file.

    \b
    elasticflow explain EF101
    elasticflow explain
    elasticflow explain num_train_epochs
    """
    from elasticflow.cli.output import paint
    from elasticflow.jobfile.diagnostics.explanations import explanation_of, titles

    if code is None:
        for name, title in titles().items():
            click.echo(f"{paint(name, bold=True)}  {title}")
        return FINISHED
    explanation = explanation_of(code.upper())
    if explanation is None and (meaning := _meaning(code)):
        click.echo(meaning)
        return FINISHED
    if explanation is None:
        raise click.BadParameter(f'there is no code "{code}"; {_hint(code.upper())}', param_hint="CODE")
    heading = paint(f"{code.upper()}: {explanation.title}", bold=True)
    click.echo(f"{heading}\n\n{textwrap.fill(explanation.reason, 96)}")
    for label, example, colour in (("Bad:", explanation.bad, "red"), ("Good:", explanation.good, "green")):
        click.echo(f"\n{paint(label, colour, bold=True)}\n{textwrap.indent(example, '    ')}")
    return FINISHED


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


def _hint(code: str) -> str:
    """Return a hint with the existing codes: only those of the same group if *code* looks like a code."""
    from elasticflow.jobfile.diagnostics.explanations import code_groups

    groups = {heading: list(titles) for heading, titles in code_groups().items()}
    exact = f"EF{code[-3:]}"
    if re.fullmatch(r"(EF)?[0-9]{3}", code):
        for heading, codes in groups.items():
            if exact in codes:
                return f"did you mean {exact}?"
            if codes[0][:3] == exact[:3]:
                return f"those of its kind ({heading.lower()}) are {', '.join(codes)}"
    ranges = ", ".join(f"{codes[0]} to {codes[-1]}" for codes in groups.values())
    return f"codes are {ranges}: `elasticflow explain` lists them"
