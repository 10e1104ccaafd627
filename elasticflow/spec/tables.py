"""The merged dict -> validated tables, one by one, so that a bad table hides nothing in another (floor 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from elasticflow.spec import codes
from elasticflow.spec.entries.known_calls import content_of
from elasticflow.spec.findings.showing import dotted
from elasticflow.spec.job import RESERVED_TABLES, Job

if TYPE_CHECKING:
    from elasticflow.spec.findings.diagnostics import Diagnostic
    from elasticflow.spec.text.source import Source
    from elasticflow.spec.wording import Finding

# Of each pair exactly one key must be given; looked at before types, so that both problems show.
_ONE_OF = {"model": ("loss", "step"), "train": ("epochs", "steps")}
_EXAMPLES = {
    "job": 'name = "mnist"',
    "model": 'entry = "examples.mnist:Net" and loss = "torch.nn.functional:cross_entropy"',
    "optimizer": 'entry = "torch.optim:AdamW"',
    "dataset": 'entry = "examples.mnist:digits" and global_batch_size = 256',
    "train": "epochs = 5",
}


def model_of(name: str) -> type[BaseModel]:
    """Return the model of a table."""
    annotation = Job.model_fields[name].annotation
    members = [annotation, *get_args(annotation)]
    return next(each for each in members if isinstance(each, type) and issubclass(each, BaseModel))


class KnownTables(dict[tuple[str, object], Any]):
    """Tables that were right, by name and content: the cases of a matrix share most of theirs."""

    def default(self, name: str) -> BaseModel:
        """Return a table that was left out."""
        content = name, ""
        if content not in self:
            self[content] = model_of(name).model_construct()
        table: BaseModel = self[content]
        return table


def read_tables(source: Source, known: KnownTables) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Return the tables that are right by name, defaults for those left out, and what is wrong with the others.

    Args:
        source: The job.
        known: Tables that need not be validated again; those that are right are added.
    """
    tables: dict[str, Any] = {}
    found = [_foreign(source, name) for name in source.raw if name not in Job.model_fields]
    for name, field in Job.model_fields.items():
        if name not in source.raw:
            if not field.is_required():
                tables[name] = None if field.default is None else known.default(name)
            elif not any(f'did you mean "{name}"' in (each.help or "") for each in found):
                found.append(_missing_table(source, name))
            continue
        content = name, content_of(source.raw[name])
        if content not in known:
            table, problems = read_table(source, name)
            found += problems
            if problems:
                continue
            known[content] = table
        tables[name] = known[content]
    return tables, found


def read_table(source: Source, name: str) -> tuple[Any, list[Diagnostic]]:
    """Return a table that is there, and what is wrong with it; one that is wrong is None."""
    findings, table = _one_of(name, source.raw[name]), None
    try:
        table = model_of(name).model_validate(source.raw[name])
    except ValidationError as error:
        from elasticflow.spec.wording import find  # most files have nothing to say

        details = error.errors(include_url=False, include_input=False)
        findings += _sifted([find(each, name, source.raw) for each in details])
    return table, [_placed(source, each) for each in _without_echoes(findings)]


def _placed(source: Source, finding: Finding) -> Diagnostic:
    return source.problem(
        finding.code, finding.message, finding.path, at_key=finding.at_key, remedy=finding.remedy
    )


def _foreign(source: Source, name: str) -> Diagnostic:
    if name in RESERVED_TABLES:
        message = f"[{name}] is not supported by this version"
        return source.problem(codes.NOT_BUILT, message, (name,), at_key=True, remedy="take the table out")
    if name == "extends":  # files' own were taken out on reading
        message = "extends cannot be set by a flag"
        return source.problem(codes.BAD_SET, message, (name,), at_key=True, remedy="write it in the job file")
    from elasticflow.spec.wording import unknown_key

    return _placed(source, unknown_key((name,), source.raw[name]))


def _missing_table(source: Source, name: str) -> Diagnostic:
    remedy = f"add [{name}] with {_EXAMPLES[name]}"
    return source.problem(codes.MISSING, f"missing table [{name}]", (name,), remedy=remedy)


def _one_of(name: str, raw: object) -> list[Finding]:
    if name not in _ONE_OF or not isinstance(raw, dict):
        return []
    from elasticflow.spec.wording import Finding

    first, second = _ONE_OF[name]
    if first in raw and second in raw:
        message = f"{dotted((name, first))} and {dotted((name, second))} exclude each other"
        remedy = (
            f"keep one of them; where the other comes from a base, leave it out with --set {name}.{first}="
        )
        return [Finding(codes.EXCLUSIVE, message, (name, second), True, remedy)]
    if first not in raw and second not in raw:
        message = f"[{name}] needs {first} or {second}"
        examples = {"loss": 'loss = "torch.nn.functional:cross_entropy"', "epochs": "epochs = 5"}
        return [Finding(codes.EXCLUSIVE, message, (name,), True, f"add a line such as: {examples[first]}")]
    return []


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Return the findings less what only follows from a mistyped key: `epoch` for `epochs` is one mistake, not two."""
    meant = " ".join(each.remedy or "" for each in findings if each.code == codes.UNKNOWN_KEY)
    return [
        each
        for each in findings
        if each.code not in {codes.MISSING, codes.EXCLUSIVE}
        or not any(f'did you mean "{key}"' in meant for key in _wanted(each))
    ]


def _wanted(finding: Finding) -> tuple[str, ...]:
    if finding.code == codes.EXCLUSIVE:
        return _ONE_OF[str(finding.path[0])] if len(finding.path) == 1 else ()
    return (str(finding.path[-1]),)


def _sifted(findings: list[Finding]) -> list[Finding]:
    """Return one finding per place: of what the members of a union say, the one that says most."""
    weight = {codes.WRONG_TYPE: 0, codes.EXCLUSIVE: -1}
    best: dict[object, Finding] = {}
    for each in findings:
        if each.code == codes.EXCLUSIVE:
            continue  # said by _one_of already, also when types are wrong
        at = (each.path, each.message) if each.at_key else each.path
        rival = best.get(at)
        if rival is None or _rank(each, weight) > _rank(rival, weight):
            best[at] = each
    paths = [each.path for each in best.values()]
    return [
        each
        for each in best.values()
        if each.code != codes.WRONG_TYPE
        or not any(len(path) > len(each.path) and path[: len(each.path)] == each.path for path in paths)
    ]


def _rank(finding: Finding, weight: dict[str, int]) -> tuple[int, int]:
    # A bound or a form says more than a list of choices, and that more than a type.
    is_choice = finding.code == codes.OUT_OF_RANGE and " or " in finding.message
    return weight.get(finding.code, 1 if is_choice else 2), len(finding.message)
