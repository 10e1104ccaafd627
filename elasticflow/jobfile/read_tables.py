"""The merged dict -> validated tables, one by one, so that a bad table hides nothing in another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import SET_NAME, EvaluationTable, sets_beside_keys
from elasticflow.jobfile.tables.job import NEEDED_TO_TRAIN, OF_TRAINING, Job, model_of
from elasticflow.jobfile.tables.types import ONE_OF
from elasticflow.jobfile.text.layers import content_of, value_at

if TYPE_CHECKING:
    from pydantic import BaseModel

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source
    from elasticflow.jobfile.wording.pydantic_messages import TableProblem

_OF_SCRIPT = {
    "model": "the script makes its own model",
    "optimizer": "the script makes its own optimizer",
    "lr_scheduler": "the script makes its own schedule",
    "dataset": "the script reads its own data",
    "evaluation": "the script does its own evaluation",
    "hooks": "the script calls its own functions",
    "train": "the script says how long it trains",
    "ddp": "the script wraps its own model",
    "parallel": "the script shards its own model, as with `elasticflow.join(shard=2)` and `run.wrap`",
}


class TableCache(dict[tuple[str, object], Any]):
    """Valid tables by name and content: the cases of a matrix share most of their tables."""

    def default(self, name: str) -> BaseModel:
        """Return the default of a table that is left out."""
        content = name, ""
        if content not in self:
            self[content] = model_of(name).model_construct()
        table: BaseModel = self[content]
        return table


def read_tables(source: Source, cache: TableCache) -> tuple[ValidTables, list[Diagnostic]]:
    """Return the valid tables by name, with defaults for absent tables, and the problems of the other tables.

    Args:
        cache: Tables that need not be validated again; valid tables are added.
    """
    tables: dict[str, BaseModel | None] = {}
    diagnostics: list[Diagnostic] = []
    problems: list[TableProblem] = []
    for name in source.raw:
        if name not in Job.model_fields:
            diagnostics += _foreign(source, name, problems)
    is_script = "script" in source.raw
    for name, field in Job.model_fields.items():
        if name in OF_TRAINING and is_script:
            if name in source.raw:
                diagnostics.append(_beside_script(source, name))
            continue
        if name not in source.raw:
            if not field.is_required() and name not in NEEDED_TO_TRAIN:
                tables[name] = None if field.default is None else cache.default(name)
            else:
                problems.append(_missing_table(name))
            continue
        content = name, content_of(source.raw[name])
        if content not in cache:
            table, findings = _read(source, name)
            problems += findings
            if findings:
                continue
            cache[content] = table
        tables[name] = cache[content]
    return cast("ValidTables", tables), diagnostics + _placed(source, problems) if problems else diagnostics


def read_table(source: Source, name: str) -> tuple[Any, list[Diagnostic]]:
    """Return a table that the source has, or None, and the table's problems."""
    table, problems = _read(source, name)
    return table, _placed(source, problems) if problems else []


def _read(source: Source, name: str) -> tuple[Any, list[TableProblem]]:
    if name == "evaluation" and (mixed := sets_beside_keys(source.raw[name])) is not None:
        return _read_sets(source, mixed)
    problems, table = _one_of(name, source.raw[name]), None
    try:
        table = model_of(name).model_validate(source.raw[name])
    except ValidationError as error:
        from elasticflow.jobfile.wording.pydantic_messages import problem_of  # most files have no errors

        details = error.errors(include_url=False, include_input=False)
        found = [problem_of(each, name, source.raw) for each in details]
        problems += _sifted(found) + _behind_unknown_keys(source.raw, name, found)
    return table, problems


def _behind_unknown_keys(raw: TomlTable, name: str, found: list[TableProblem]) -> list[TableProblem]:
    """Return what a table's own checks say, which pydantic leaves out while a key is unknown.

    They see the table with each unknown key under the name that was meant, or without it.
    """
    from elasticflow.jobfile.wording.pydantic_messages import problem_of

    if any(each.code != codes.UNKNOWN_KEY or len(each.path) != 2 for each in found):
        return []
    meant = dict(raw[name])
    for each in found:
        value, keys = meant.pop(str(each.path[1])), each.suggestion.keys if each.suggestion else ()
        if len(keys) == 1 and keys[0][:-1] == (name,):
            meant.setdefault(str(keys[0][1]), value)
    try:
        model_of(name).model_validate(meant)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        behind = [problem_of(each, name, {**raw, name: meant}) for each in details]
        there = [each for each in behind if len(each.path) > 1 and value_at(each.path, raw) is not None]
        return _sifted(there)
    return []


def _read_sets(source: Source, own: list[str]) -> tuple[Any, list[TableProblem]]:
    """Return the evaluation sets by name; *own*: keys of [evaluation] itself, which may have none beside sets."""
    tables: dict[str, Any] = {}
    errors: dict[str, ValidationError | None] = {}
    for name, raw in source.raw["evaluation"].items():
        if name in own:
            continue
        try:
            tables[name] = EvaluationTable.model_validate(raw)
        except ValidationError as error:
            errors[name] = error
        if not re.fullmatch(SET_NAME, name):
            errors.setdefault(name, None)
    if not own and not errors:
        return tables, []
    from elasticflow.jobfile.wording.pydantic_messages import mixed_problem, problems_of_set

    problems = [each for name, error in errors.items() for each in problems_of_set(name, error, source.raw)]
    problems = _sifted(problems)
    return tables, [*problems, mixed_problem(source.raw["evaluation"], own)] if own else problems


def _placed(source: Source, problems: list[TableProblem]) -> list[Diagnostic]:
    from elasticflow.jobfile.wording.pydantic_messages import place_problems

    return place_problems(source, problems)


def _foreign(source: Source, name: str, problems: list[TableProblem]) -> list[Diagnostic]:
    if name == "extends":  # reading removed the `extends` of files
        message = "extends cannot be set by a flag"
        remedy = "write it in the job file"
        return [source.problem(codes.BAD_SET, message, (name,), at_key=True, remedy=remedy)]
    from elasticflow.jobfile.wording.pydantic_messages import unknown_key

    problems.append(unknown_key((name,), source.raw[name]))
    return []


def _missing_table(name: str) -> TableProblem:
    from elasticflow.jobfile.wording.pydantic_messages import TableProblem
    from elasticflow.jobfile.wording.type_descriptions import example

    remedy = f"add [{name}] with {example((name,))}"
    return TableProblem(codes.MISSING, f"missing table [{name}]", (name,), False, remedy)


def _beside_script(source: Source, name: str) -> Diagnostic:
    message = f"[{name}] has no meaning beside [script]: {_OF_SCRIPT[name]}"
    remedy = f"leave [{name}] out, or leave [script] out and let the job file say what is trained"
    return source.problem(codes.EXCLUSIVE, message, (name,), at_key=True, remedy=remedy)


def _one_of(name: str, raw: object) -> list[TableProblem]:
    if name not in ONE_OF or not isinstance(raw, dict):
        return []
    first, second = ONE_OF[name]
    if (first in raw) is not (second in raw):
        return []
    from elasticflow.jobfile.wording.pydantic_messages import TableProblem
    from elasticflow.jobfile.wording.type_descriptions import example

    if first in raw:
        message = f"{dotted((name, first))} and {dotted((name, second))} exclude each other"
        remedy = (
            f"keep one of them; where the other comes from a base, leave it out with --set {name}.{first}="
        )
        return [TableProblem(codes.EXCLUSIVE, message, (name, second), True, remedy)]
    message = f"[{name}] needs {first} or {second}"
    remedy = f"add a line such as: {example((name, first))}"
    return [TableProblem(codes.EXCLUSIVE, message, (name,), True, remedy)]


def _sifted(problems: list[TableProblem]) -> list[TableProblem]:
    """Return one problem per place: the most telling of the problems that the members of a union give."""
    weight = {codes.WRONG_TYPE: 0, codes.EXCLUSIVE: -1}
    best: dict[object, TableProblem] = {}
    for each in problems:
        if each.code == codes.EXCLUSIVE and each.path[0] in ONE_OF:
            continue  # _one_of has said so already, also if types are wrong
        at = (each.path, each.message) if each.at_key else each.path
        rival = best.get(at)
        if rival is None or _rank(each, weight) > _rank(rival, weight):
            best[at] = each
    around = {each.path[:length] for each in best.values() for length in range(len(each.path))}
    return [each for each in best.values() if each.code != codes.WRONG_TYPE or each.path not in around]


def _rank(problem: TableProblem, weight: dict[str, int]) -> tuple[int, int]:
    # A bound or a form says more than a list of choices, and a list says more than a type.
    is_choice = problem.code == codes.OUT_OF_RANGE and " or " in problem.message
    return weight.get(problem.code, 1 if is_choice else 2), len(problem.message)
