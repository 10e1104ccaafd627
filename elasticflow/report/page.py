"""A report as self-contained HTML: every text is escaped, and a policy forbids every script but ours."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from elasticflow.observe.curves import EVALUATED
from elasticflow.observe.terminal.formats import (
    activity_word,
    local_time,
    number,
    percent,
    plural,
    size,
    span,
)
from elasticflow.report.chart import COLOURS, Labelled, chart_of
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.observe.curves import Curve
    from elasticflow.report.chart import Chart
    from elasticflow.report.facts import RunFacts
    from elasticflow.report.timeline import Mark, Timeline

# All parts of the time, from good to bad; each part has its own colour.
_PART_ORDER = (
    "training", "evaluating", "starting", "restoring", "stalled", "ending", "restarting", "detecting", "waiting", "redone",
    "outage",
)  # fmt: skip
_MOST_MARKS = 300
# Words in a metric's name that say which direction is better.
_DIRECTIONS = {
    **dict.fromkeys(("loss", "error", "perplexity", "mse", "mae", "rmse"), "min"),
    **dict.fromkeys(("accuracy", "acc", "auc", "auroc", "f1", "precision", "recall"), "max"),
}
_MOST_ROWS = 500


@dataclass(frozen=True)
class Part:
    """A part of the time: its name, share in percent, and words."""

    name: str
    share: float
    words: str


@dataclass(frozen=True)
class Place:
    """A mark or span on the timeline: its place and width in percent."""

    left: float
    width: float
    kind: str
    text: str


def render_run(facts: RunFacts) -> str:
    """Return the report of one run."""
    begins = _generation_begins(facts.curves)
    charts = [
        chart
        for curve in facts.curves
        if (chart := chart_of(curve.name, [Labelled(curve)], begins)) is not None
    ]
    durations = facts.status.durations or facts.status.launch_durations
    return _render(
        "single.html",
        facts=facts,
        status=facts.status,
        charts=charts,
        parts=parts_of_bar(durations, is_blind=facts.status.has_no_steps),
        goodput=percent(facts.status.goodput),
        took=span(sum(durations.values())) if durations else "-",
        lanes=(lanes := _lanes(facts.timeline)),
        lanes_left_out=len(facts.timeline.lanes) - len(lanes),
        snapshot_marks=_thinned(facts.timeline.snapshots, facts.timeline.seconds),
        pauses=_pauses(facts.timeline),
        ticks=_time_ticks(facts.timeline.seconds),
        most_rows=_MOST_ROWS,
        title=facts.name,
    )


@dataclass(frozen=True)
class ComparedRun:
    """One of several runs: facts, label, colour, values of the keys that vary, and the metrics in which it is best."""

    facts: RunFacts
    label: str
    colour: int
    values: Mapping[str, str]
    is_best: Mapping[str, bool]
    parts: Sequence[Part]
    took: str
    goodput: str


def render_comparison(runs: Sequence[RunFacts], *, title: str, is_sweep: bool) -> str:
    """Return the report of several runs side by side: results by the keys that vary, and curves in one plot."""
    varying = varying_keys(runs)
    metrics = list(dict.fromkeys(name for facts in runs for name in facts.status.evaluation))
    best = {name: _best(name, runs) for name in ("loss", *(f"{EVALUATED}{metric}" for metric in metrics))}
    labels = _labels(runs, is_sweep=is_sweep)
    compared = [
        _compared(facts, labels[number], number % COLOURS, varying, best) for number, facts in enumerate(runs)
    ]
    names = list(dict.fromkeys(curve.name for facts in runs for curve in facts.curves))
    charts: list[Chart] = []
    for name in names:
        curves = [
            Labelled(curve, run.label, run.colour)
            for run in compared
            for curve in run.facts.curves
            if curve.name == name
        ]
        if (chart := chart_of(name, curves)) is not None:
            charts.append(chart)
    return _render(
        "compare.html",
        title=title,
        is_sweep=is_sweep,
        runs=compared,
        varying=varying,
        metrics=metrics,
        charts=charts,
        environment=_differing(facts.environment for facts in runs),
    )


def varying_keys(runs: Sequence[RunFacts]) -> list[str]:
    """Return the keys of the jobs whose values are not the same in all runs, except the jobs' names."""
    return [name for name in _differing(_values(facts) for facts in runs) if name != "job.name"]


def _values(facts: RunFacts) -> dict[str, str]:
    return {key.name: key.value for key in facts.keys}


def _differing(tables: Iterable[Mapping[str, str]]) -> list[str]:
    found = list(tables)
    names = dict.fromkeys(name for table in found for name in table)
    return [name for name in names if len({table.get(name) for table in found}) > 1]


def _labels(runs: Sequence[RunFacts], *, is_sweep: bool) -> list[str]:
    if is_sweep:
        return [facts.case or facts.name for facts in runs]
    ids = [facts.status.folder.run_id for facts in runs]
    return ids if len(set(ids)) == len(ids) else [facts.name for facts in runs]


def _best(name: str, runs: Sequence[RunFacts]) -> float | None:
    """Return the best of the runs' values; None if they are equal, or it is not known which direction is better.

    The jobs' `evaluation.best` gives the direction, or else a word in the metric's name. A value that is no finite number, of a
    run that diverged, is never the best.
    """
    values = [value for facts in runs if (value := _value(name, facts)) is not None]
    if len(values) < 2 or len(set(values)) == 1:
        return None
    of_set, _, metric = name.removeprefix(EVALUATED).rpartition(".")
    key = f"evaluation.{of_set}.best" if of_set else "evaluation.best"
    said = {
        side for facts in runs for side in ("min", "max") if _values(facts).get(key) == f'"{side} {metric}"'
    }
    sides = said or {
        _DIRECTIONS[word] for word in re.findall(r"[a-z0-9]+", metric.lower()) if word in _DIRECTIONS
    }
    if len(sides) != 1:
        return None
    return min(values) if sides == {"min"} else max(values)


def _value(name: str, facts: RunFacts) -> float | None:
    found = facts.status.evaluation.get(name.removeprefix(EVALUATED))
    value = facts.status.loss if name == "loss" else found
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _compared(
    facts: RunFacts, label: str, colour: int, varying: Sequence[str], best: Mapping[str, float | None]
) -> ComparedRun:
    values, durations = _values(facts), facts.status.durations
    return ComparedRun(
        facts,
        label,
        colour,
        {name: values[name] for name in varying if name in values},
        {name: value is not None and _value(name, facts) == value for name, value in best.items()},
        parts_of_bar(durations, is_blind=facts.status.has_no_steps),
        span(sum(durations.values())) if durations else "-",
        percent(facts.status.goodput),
    )


def parts_of_bar(durations: Mapping[str, float], *, is_blind: bool = False) -> list[Part]:
    """Return the parts of the time that took any, good parts first; *is_blind* as in `took`."""
    total = sum(durations.values())
    if total <= 0:
        return []
    known = [name for name in _PART_ORDER if durations.get(name, 0) > 0]
    others = sorted(name for name, seconds in durations.items() if seconds > 0 and name not in _PART_ORDER)
    return [
        Part(
            name,
            100 * durations[name] / total,
            f"{activity_word(name, is_blind=is_blind)} {span(durations[name])}",
        )
        for name in (*known, *others)
    ]


def _generation_begins(curves: Sequence[Curve]) -> dict[int, int]:
    begins: dict[int, int] = {}
    for curve in curves:
        for segment in curve.segments:
            step = segment.points[0][0]
            begins[segment.generation] = min(step, begins.get(segment.generation, step))
    return begins


def _lanes(timeline: Timeline) -> list[dict[str, Any]]:
    total = timeline.seconds or 1.0
    return [
        {
            "node": lane.node,
            "spans": [
                Place(
                    100 * s.begin / total,
                    100 * (s.end - s.begin) / total,
                    f"g{(s.generation - 1) % COLOURS}{'' if s.is_training else ' starting'}",
                    s.text,
                )
                for s in lane.spans
            ],
            "marks": _thinned(lane.marks, timeline.seconds),
        }
        for lane in timeline.shown_lanes()
    ]


def _thinned(marks: Sequence[Mark], seconds: float) -> list[Place]:
    """Return the marks; of several marks at about the same place, only the worst."""
    total = seconds or 1.0
    places: dict[int, list[Mark]] = {}
    for mark in marks:
        places.setdefault(round(_MOST_MARKS * mark.at / total), []).append(mark)
    rank = {"good": 0, "note": 1, "bad": 2}
    found = []
    for column, here in sorted(places.items()):
        worst = max(here, key=lambda mark: rank[mark.tone])
        text = worst.text if len(here) == 1 else f"{worst.text} (and {len(here) - 1} more)"
        found.append(Place(100 * min(1.0, column / _MOST_MARKS), 0.0, worst.tone, text))
    return found


def _pauses(timeline: Timeline) -> list[Place]:
    total = timeline.seconds or 1.0
    return [
        Place(100 * p.at / total, 0.0, "pause", f"nobody led the run for {span(p.seconds)}")
        for p in timeline.pauses
    ]


def _time_ticks(seconds: float) -> list[Place]:
    units = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((unit for unit in units if seconds / unit <= 8), 86400 * max(1, round(seconds / 86400 / 6)))
    count = int(seconds // step) if step else 0
    return [
        Place(100 * i * step / (seconds or 1.0), 0.0, "", _round_time(i * step)) for i in range(count + 1)
    ]


def _round_time(seconds: int) -> str:
    """Return a time as the axis shows it: `40 s`, `5 min`, `2 h`, `3 d`."""
    for unit, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds // unit} {word}"
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds} s"


def _resource(name: str) -> str:
    return resources.files("elasticflow.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, span=span, size=size, local_time=local_time, plural=plural, bar=parts_of_bar
    )
    return environment.get_template(name)


def _render(template: str, **values: Any) -> str:
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template(template).render(
        **values,
        style=_resource("report.css"),
        script=script,
        script_digest=digest,
        version=VERSION,
    )
