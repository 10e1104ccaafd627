"""`elasticflow lint [PATH]...`: read training scripts for faults that a kill, a restart or a resize brings out."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, cast

import click

from elasticflow.cli.output import counts_of, cut, paint, report_findings, shortest_path
from elasticflow.cli.parameters import SCRIPT_OR_FOLDER, findings_option, strict_option
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, in_order
from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.render_text import Format
    from elasticflow.lint.check import Selection
    from elasticflow.lint.script.forms import Form
    from elasticflow.python_source.script import Script

_WIDTH = 60
_CODE = re.compile(r"EF6?[0-9]{0,2}|ALL")
_SUBJECTS = {
    "EF60": "samplers, batch sizes per rank, checks that a resize breaks",
    "EF61": "checkpoints: written whole, by one rank, with all state, loaded by a restart",
    "EF62": "ports, mp.spawn, --local_rank",
    "EF63": "collectives that some ranks do not reach",
    "EF64": "find_unused_parameters",
}
UNTOLD = (
    "reading cannot tell what other files do, which values a run has, or whether a restart finds its checkpoint: "
    "kill a worker of a short run to see"
)


@click.command("lint")
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=SCRIPT_OR_FOLDER)
@click.option(
    "--select", multiple=True, metavar="CODES", help="Report only these codes, with notes: EF61,EF631."
)
@click.option("--ignore", multiple=True, metavar="CODES", help="Leave out these codes.")
@strict_option
@findings_option
def command(
    paths: tuple[Path, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    output_format: str,
    *,
    strict: bool,
) -> int:
    """Read training scripts for known faults that a kill, a restart or a resize brings out.

    Nothing is run or imported, neither your code nor torch. Only certain findings are reported; at the end the command
    lists its rules and, for a single script, the lines to change for elasticflow.join. Exit code 0 without errors, 1
    with errors. An error hangs or destroys by itself, a warning loses work or changes the training, and a note may be
    intended: it is shown in JSON and SARIF, or when its code is selected.

    A folder stands for its Python files, at any depth, that import torch or a library above it; default: the project.
    Hidden folders, virtual environments and runs are left out.

    `# noqa: EF611` at the end of a line suppresses its finding, `# elasticflow: noqa: EF611` all in the whole file.

    \b
    elasticflow lint train.py
    elasticflow lint --select EF61 src/            rules about checkpoints, with notes
    elasticflow lint --ignore EF603,EF614 train.py
    elasticflow lint --format github .
    elasticflow guide EF611                        why, with a bad and a good example
    """
    from elasticflow.lint.check import lint_file

    selection = _selection(select, ignore)
    files, num_others = _files(paths)
    findings = in_order(each for path, name in files for each in lint_file(path, name, selection))
    style = cast("Format", output_format)
    shown = [each for each in findings if _is_shown(each, style, selection)]
    code = report_findings(
        findings, shown, style, lambda: _summary(shown, len(files), num_others, strict=strict), strict=strict
    )
    if style == "full":
        show_looked_for(findings, selection)
        if len(paths) == len(files) == 1 and paths[0] == files[0][0]:
            _show_form_of(*files[0])
    return code


def _show_form_of(path: Path, name: str) -> None:
    from elasticflow.errors import ScriptError
    from elasticflow.lint.check import read
    from elasticflow.lint.script.forms import form_of

    try:
        script = read(path, name)
    except ScriptError:
        return  # the findings report the problem
    form = form_of(script)
    if form.kind != "none":
        show_form(name, script, form)


def show_form(name: str, script: Script, form: Form) -> None:
    """Print the form and the rung of a script, the lines to change for the next rung, and the example to follow."""
    from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
    from elasticflow.lint.rungs import RUNGS, next_changes, template_of

    click.echo(f"\n{paint(f'rung {form.rung}', bold=True)}  {form.words}\n        {RUNGS[form.rung]}")
    if form.rung == len(RUNGS) - 1:
        return
    click.echo(f"{paint(f'rung {form.rung + 1}', bold=True)}  {RUNGS[form.rung + 1]}")
    for change in next_changes(script, form):
        click.echo(f"  {name}:{change.line}: {cut(mask_secrets(change.before), _WIDTH)}")
        click.echo(f"      {paint('->', dim=True)} {change.after}")
    if form.rung:
        click.echo("        `elasticflow guide own-loop`: the same bits at any number of workers")
    elif template := template_of(script, form):
        click.echo(
            f"        a script of this form that has it all: `elasticflow guide --template {template}`"
        )
        click.echo("        each call, and lines that are easy to get wrong: `elasticflow guide own-loop`")
    else:
        click.echo("        no example of this form; it runs as it is: `elasticflow guide adopting`")


def show_looked_for(findings: Sequence[Diagnostic], selection: Selection) -> None:
    """Print the rules, the number of findings of each, and that reading cannot tell everything."""
    rows = looked_for(findings, selection)
    width, wide = (max((len(row[n]) for row in rows), default=0) for n in (0, 1))
    click.echo(f"\n{paint('looked for', bold=True)}")
    for codes, subject, found in rows:
        click.echo(f"  {codes:<{width}}  {subject:<{wide}}  {found}")
    click.echo(paint(UNTOLD, dim=True))


def _selection(select: Sequence[str], ignore: Sequence[str]) -> Selection:
    from elasticflow.jobfile.diagnostics.codes import titles
    from elasticflow.lint.check import Selection

    known = [code for code in titles() if code.startswith("EF6")]
    sides = []
    for option, values in (("--select", select), ("--ignore", ignore)):
        words = [word.strip().upper() for value in values for word in value.split(",") if word.strip()]
        for word in words:
            if not _CODE.fullmatch(word) or (
                word != "ALL" and not any(code.startswith(word) for code in known)
            ):
                raise click.BadParameter(
                    f'there is no code "{word}"; codes are {", ".join(known)}, and their beginnings',
                    param_hint=option,
                )
        sides.append(tuple("EF" if word == "ALL" else word for word in words))
    return Selection(*sides)


def _files(given: Sequence[Path]) -> tuple[list[tuple[Path, str]], int]:
    """Return the files to read, each once with its given name, and the number of files that do not import torch."""
    from elasticflow.jobfile.project import current_project_root, files_below
    from elasticflow.lint.check import may_train

    files: dict[str, tuple[Path, str]] = {}
    num_others = 0
    for path in given or [current_project_root()]:
        inside = [*files_below(path, ".py")] if path.is_dir() else [path]
        if not inside:
            raise click.UsageError(f"there is no Python file in {path}")
        for each in inside:
            if may_train(each):
                name = shortest_path(each) if path.is_dir() else str(each)
                files.setdefault(os.path.realpath(each), (each, name))
            else:
                num_others += 1
    return list(files.values()), num_others


def _is_shown(finding: Diagnostic, style: Format, selection: Selection) -> bool:
    is_asked = any(len(each) > len("EF6") and finding.code.startswith(each) for each in selection.select)
    return finding.severity != "note" or style in {"json", "sarif"} or is_asked or "EF" in selection.select


def _summary(shown: Sequence[Diagnostic], num_files: int, num_others: int, *, strict: bool) -> str:
    counts = counts_of(shown, ("error", "warning", "note"))
    text = f"{plural(num_files, 'file')} checked: {counts or 'nothing found'}"
    if strict and counts_of(shown, ["warning"]):
        text += " (with --strict, warnings are errors)"
    if num_others:
        text += paint(
            f" ({num_others:,} other{'s do' if num_others > 1 else ' does'} not import torch)", dim=True
        )
    return text


def looked_for(findings: Iterable[Diagnostic], selection: Selection) -> list[tuple[str, str, str]]:
    """Return a row for each selected subject: its codes, the fault, and the number of findings by code."""
    from elasticflow.jobfile.diagnostics.codes import titles

    findings = list(findings)
    found = Counter(each.code for each in findings)
    notes = {each.code for each in findings if each.severity == "note"}
    rows = []
    for prefix, subject in _SUBJECTS.items():
        wanted = [code for code in titles() if code.startswith(prefix) and code != "EF600" and selection.wants(code)]  # fmt: skip
        if not wanted:
            continue
        codes = wanted[0] if len(wanted) == 1 else f"{wanted[0]} to {wanted[-1]}"
        parts = [
            f"{found[code]} {code}{' (note)' if code in notes else ''}" for code in wanted if found[code]
        ]
        rows.append((codes, subject, ", ".join(parts) or "none found"))
    return rows
