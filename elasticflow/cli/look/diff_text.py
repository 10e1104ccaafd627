"""Two runs side by side in words and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.cli.terminal import paint
from elasticflow.compiler.drift.table import lines_of as table_of
from elasticflow.observe.terminal.formats import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.drift.compare import Difference, Weight
    from elasticflow.observe.run_inputs import RunInputs

_COLOURS: dict[Weight, str] = {"corrupting": "red", "trajectory": "yellow", "harmless": "green"}
_OF_DIFF = {"+": "green", "-": "red", "@": "cyan"}


def lines_of(
    old: RunInputs, new: RunInputs, differences: Sequence[Difference], sources: Sequence[str] | None
) -> Iterator[str]:
    """Yield what `elasticflow diff` prints."""
    yield f"{paint('old', bold=True)}  {old.name}"
    yield f"{paint('new', bold=True)}  {new.name}"
    yield ""
    if differences:
        yield from table_of(differences, lambda text, weight: paint(text, _COLOURS[weight], bold=True))
    else:
        yield "  no difference in job, own code, versions, machine and data"
    yield from _outcomes(old, new)
    if sources is not None:
        yield ""
        yield from (paint(line, _OF_DIFF.get(line[:1])) for line in sources or ["no file differs"])


def outcome_of(inputs: RunInputs) -> dict[str, Any] | None:
    """Return how a run went, for people and programs; None without a run folder."""
    status = inputs.status
    if status is None:
        return None
    return {
        "status": status.status,
        "launches": status.launch,
        "steps": status.step,
        "loss": status.loss,
        **{f"evaluation {name}": value for name, value in status.evaluation.items()},
        "best": status.best,
        "restarts": status.restarts,
        "samples_per_s": status.samples_per_s,
    }


def _outcomes(old: RunInputs, new: RunInputs) -> Iterator[str]:
    was, now = outcome_of(old) or {}, outcome_of(new) or {}
    names = [name for name in {**was, **now} if was.get(name) is not None or now.get(name) is not None]
    if not names:
        return
    width = max(map(len, names))
    column = max(len("old"), *(len(_shown(was.get(name))) for name in names))
    yield ""
    yield f"  {paint('how it went'.ljust(width), bold=True)}  {'old':<{column}}  new"
    for name in names:
        yield f"  {name.replace('_per_s', '/s'):<{width}}  {_shown(was.get(name)):<{column}}  {_shown(now.get(name))}"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else number(value)
