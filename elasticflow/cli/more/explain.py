"""`elasticflow explain CODE`: what a code means, or a name of another tool."""

from __future__ import annotations

import re
import textwrap

import click

from elasticflow.errors import FINISHED


@click.command("explain")
@click.argument("code", required=False)
def command(code: str | None) -> int:
    """Explain CODE, such as EF101, with a bad and a good example; without one, list all codes.

    CODE may also be a name of torchrun, Lightning, Hugging Face, Accelerate or torchtitan: what it is in a job file.

    \b
    elasticflow explain EF101
    elasticflow explain
    elasticflow explain num_train_epochs
    """
    from elasticflow.cli.terminal import paint
    from elasticflow.jobfile.diagnostics.explanations import EXPLANATIONS

    if code is None:
        for name, each in sorted(EXPLANATIONS.items()):
            click.echo(f"{paint(name, bold=True)}  {each.title}")
        return FINISHED
    found = EXPLANATIONS.get(code.upper())
    if found is None and (meaning := _meaning(code)):
        click.echo(meaning)
        return FINISHED
    if found is None:
        raise click.BadParameter(f'there is no code "{code}"; {_hint(code.upper())}', param_hint="CODE")
    click.echo(f"{paint(f'{code.upper()}: {found.title}', bold=True)}\n\n{textwrap.fill(found.why, 96)}")
    for title, example, colour in (("Bad:", found.bad, "red"), ("Good:", found.good, "green")):
        if example:
            click.echo(f"\n{paint(title, colour, bold=True)}\n{textwrap.indent(example, '    ')}")
    return FINISHED


def _meaning(name: str) -> str | None:
    """Return what a name of another tool is in a job file."""
    from elasticflow.jobfile.tables.foreign_names import meaning_of

    meaning = meaning_of(name)
    if meaning is None:
        return None
    note = meaning.note.replace("{}", "...")
    if not meaning.key:
        return f"{name}: {note}"
    return f"{name} is {meaning.key} in a job file{f' ({note})' if note else ''}"


def _hint(code: str) -> str:
    """Return which codes there are: those of the same kind where it looks like one."""
    from elasticflow.jobfile.diagnostics.codes_page import GROUPS
    from elasticflow.jobfile.diagnostics.explanations import EXPLANATIONS

    kinds = {start: sorted(each for each in EXPLANATIONS if each.startswith(start)) for start in GROUPS}
    if re.fullmatch(r"(EF)?[0-9]{3}", code) and (alike := kinds.get(f"EF{code[-3]}")):
        exact = f"EF{code[-3:]}"
        if exact in alike:
            return f"did you mean {exact}?"
        return f"those of its kind ({GROUPS[exact[:3]].lower()}) are {', '.join(alike)}"
    return (
        "codes are "
        + ", ".join(f"{kind[0]} to {kind[-1]}" for kind in kinds.values())
        + ": `elasticflow explain` lists them"
    )
