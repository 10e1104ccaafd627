"""What is due only after the end of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.checks.training_length import horizon_of
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.units import parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.source import Source

# Each key that says how often, and what it means when that is never.
_KEYS: dict[KeyPath, str] = {
    ("evaluation", "every"): "the model is evaluated once, at the end",
    ("snapshots", "every"): "one snapshot is taken, at the end: a failure goes back to the beginning",
    ("snapshots", "memory"): "nothing is held in memory",
    ("snapshots", "keep", "every"): "no snapshot is kept for it",
    ("restarts", "refill"): "the budget is never filled up again",
    ("train", "compare_replicas"): "the workers' parameters are compared before snapshots only",
    ("logging", "every"): "no metrics line is written",
}


def check(source: Source, tables: dict[str, Any]) -> Iterator[Diagnostic]:
    """Yield a warning for each interval in the files that is longer than training."""
    train = tables.get("train")
    if train is None:
        return
    horizon = horizon_of(train, tables.get("dataset"))
    for key, meaning in _KEYS.items():
        given = _given(source.raw, key) if tables.get(str(key[0])) is not None else None
        texts = [(path, text) for path, text in _texts(key, given) if text != "never"]
        never = [(path, text) for path, text in texts if horizon.is_beyond(parse_interval(text))]
        for path, text in never:
            message = f'{dotted(path)} never comes: it is "{text}", and training ends after {horizon}'
            remedy = f"shorten it; as it is, {meaning}"
            if len(never) < len(texts):
                remedy = "shorten it, or take it out of the list"
            yield source.problem(codes.NEVER_DUE, message, path, severity="warning", remedy=remedy)


def _texts(key: KeyPath, given: object) -> list[tuple[KeyPath, str]]:
    """Return each text of one, or of a list of them, with its place."""
    if isinstance(given, str):
        return [(key, given)]
    if isinstance(given, list):
        return [((*key, number), each) for number, each in enumerate(given) if isinstance(each, str)]
    return []


def _given(raw: object, key: KeyPath) -> object:
    for part in key:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
