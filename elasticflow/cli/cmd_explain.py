"""`elasticflow explain CODE`: what a code means, with a bad and a good example (floor 5)."""

from __future__ import annotations

import difflib
import textwrap

import click

from elasticflow.errors import FINISHED


@click.command("explain")
@click.argument("code", required=False)
def command(code: str | None) -> int:
    """Explain CODE, such as EF101, with a bad and a good example; without one, list all codes.

    \b
    elasticflow explain EF101
    elasticflow explain
    """
    from elasticflow.cli.terminal import paint
    from elasticflow.spec.findings.explanations import EXPLANATIONS

    if code is None:
        for name, each in sorted(EXPLANATIONS.items()):
            click.echo(f"{paint(name, bold=True)}  {each.title}")
        return FINISHED
    found = EXPLANATIONS.get(code.upper())
    if found is None:
        near = difflib.get_close_matches(code.upper(), EXPLANATIONS, 1)
        hint = f'; did you mean "{near[0]}"?' if near else "; `elasticflow explain` lists them"
        raise click.BadParameter(f'there is no code "{code}"{hint}', param_hint="CODE")
    click.echo(f"{paint(f'{code.upper()}: {found.title}', bold=True)}\n\n{textwrap.fill(found.why, 96)}")
    for title, example, colour in (("Bad:", found.bad, "red"), ("Good:", found.good, "green")):
        if example:
            click.echo(f"\n{paint(title, colour, bold=True)}\n{textwrap.indent(example, '    ')}")
    return FINISHED
