"""`elasticflow adopt SCRIPT [--diff]`: the lines that bring a training script to `elasticflow.join`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint
from elasticflow.cli.parameters import SCRIPT
from elasticflow.errors import ANSWER_IS_NO, FINISHED

if TYPE_CHECKING:
    from elasticflow.adopt.patch import Patch
    from elasticflow.adopt.reading.refusal import Reason
    from elasticflow.lint.script.forms import Form

_BY_HAND = """\
run = elasticflow.join()                          # in the place of init_process_group
run.keep(model=model, optimizer=optimizer)        # and whatever else training changes
replicas = run.wrap(model)                        # in the place of DistributedDataParallel
for epoch in run.epochs(10):
    for batch in run.batches(dataset, size=256):
        loss = loss_fn(replicas(batch.inputs), batch.targets)
        (loss * batch.share).backward()
        optimizer.step(); optimizer.zero_grad()
        run.step(loss=loss)
run.finish()                                      # in the place of destroy_process_group"""


@click.command("adopt")
@click.argument("script", metavar="SCRIPT", type=SCRIPT)
@click.option("--diff", is_flag=True, help="Print the patch alone, for `git apply` or `patch -p1`.")
def command(script: Path, *, diff: bool) -> int:
    """Show the lines that bring a training script to elasticflow.join: model, optimizer and loop stay as they are.

    SCRIPT is read, not run or imported, and not changed: the patch is for you to read and apply. It goes to standard
    output, what there is to know about it to standard error. Known are loops over epochs and batches with torch's
    DistributedDataParallel, in a function, in functions or in a class, and with Accelerate and Lightning Fabric. Exit
    code 1 where a patch is not certain to be right: then the lines that are in its way are told, and what to write by hand.

    \b
    elasticflow adopt train.py                     what would change, and what to know
    elasticflow adopt --diff train.py              the patch
    elasticflow adopt --diff train.py | git apply
    elasticflow guide own-loop                     what the new lines do
    """
    from elasticflow.adopt.edits import unified
    from elasticflow.adopt.patch import patched
    from elasticflow.adopt.reading.refusal import RefusalError
    from elasticflow.adopt.reading.source import read
    from elasticflow.lint.script.forms import form_of
    from elasticflow.lint.script.script import Script

    name = _shown(script)
    source = read(script, str(script))
    form = form_of(Script(source.text))
    if form.rung:
        click.echo(
            f"{script}:{getattr(form.node, 'lineno', 1)}: on rung {form.rung} already, {form.words}", err=True
        )
        return FINISHED
    try:
        made = patched(source.text)
    except RefusalError as error:
        _tell_refusal(str(script), form, error.reason)
        return ANSWER_IS_NO
    text = unified(source.as_written(source.text), source.as_written(made.text), name)
    if diff:
        click.echo(text.encode(), nl=False)
        _tell_notes(made, err=True)
        return FINISHED
    _tell(str(script), form, made, text)
    return FINISHED


def _shown(script: Path) -> str:
    """Return the script's path as a patch names it: from the working folder, else its file name."""
    place, here = os.path.realpath(script), os.path.realpath(Path.cwd())
    return os.path.relpath(place, here) if place.startswith(f"{here}/") else script.name


def _tell(script: str, form: Form, made: Patch, text: str) -> None:
    lines = text.splitlines()[2:]
    added, taken = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    click.echo(f"{paint(script, bold=True)}  {form.words}: rung 0, torchrun's contract")
    click.echo(f"rung 1, elasticflow.join: {added} lines more, {taken} less")
    _tell_notes(made, err=False)
    click.echo(f"\n{paint('next', bold=True)}")
    command = f"elasticflow adopt --diff {script}"
    for each, does in ((command, "the patch, to be read"), (f"{command} | git apply", "applied"), (f"elasticflow init {script}", "a job file for it")):  # fmt: skip
        click.echo(f"  {each:<{len(command) + 12}}  {does}")


def _tell_notes(made: Patch, *, err: bool) -> None:
    for note in made.notes:
        click.echo(f"{paint('note', 'yellow')}  {note}", err=err)


def _tell_refusal(script: str, form: Form, reason: Reason) -> None:
    place = script if reason.line is None else f"{script}:{reason.line}"
    click.echo(
        f"{paint('no patch', 'red')}  {script} is {form.words}, and no patch is certain to be right", err=True
    )
    click.echo(f"  {place}: {reason.message}", err=True)
    click.echo(f"  help: {reason.remedy}", err=True)
    if form.kind in {"none", "trainer", "sharded"}:
        return
    click.echo("\nby hand, rung 1 (`elasticflow guide own-loop`):", err=True)
    click.echo("\n".join(f"  {line}" for line in _BY_HAND.splitlines()), err=True)
