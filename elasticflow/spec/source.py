"""Job file, what it `extends`, and `--set` -> one dict that remembers where each key stands (floor 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elasticflow.spec import codes
from elasticflow.spec.diagnostics import Diagnostic, Severity, at
from elasticflow.spec.positions import KeyPath, Span, Spot, index
from elasticflow.spec.reading import MOST_LEVELS, UnreadableError, depth, parse, read_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_KEY_PART = r"""[ \t]*(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
_ASSIGNMENT = re.compile(rf"(?P<key>{_KEY_PART}(?:\.{_KEY_PART})*)=", re.DOTALL)
_MOST_FILES = 50


@dataclass(frozen=True)
class Layer:
    """One text that contributes keys.

    Attributes:
        shown: Its name in messages: the file as the user wrote it, or `--set`.
        text: The text, newlines normalised.
        raw: Its own keys.
        spots: Where they stand.
        is_flag: From `--set`.
    """

    shown: str
    text: str
    raw: dict[str, Any]
    spots: dict[KeyPath, Spot]
    is_flag: bool = False


@dataclass(frozen=True)
class Source:
    """All layers of a job, weakest first, and their keys merged.

    Attributes:
        raw: The merged keys, `extends` left out.
        layers: Bases, then the job file, then one per `--set`.
        files: The job file and every file it extends, each once.
        problems: Why a text could not be read; the other texts are merged nevertheless.
    """

    raw: dict[str, Any]
    layers: tuple[Layer, ...]
    files: tuple[Path, ...]
    problems: tuple[Diagnostic, ...]

    def problem(
        self, code: str, message: str, path: KeyPath, *, at_key: bool = False, severity: Severity = "error", remedy: str | None = None
    ) -> Diagnostic:  # fmt: skip
        """Return a diagnostic at the key or value that *path* names, or at the nearest table around it."""
        layer, span = self.find(path, at_key=at_key)
        found = at(
            code, message, file=layer.shown, text=layer.text, span=span, severity=severity, remedy=remedy
        )
        return found if span.end else replace(found, excerpt=None)  # no line shows what is missing

    def find(self, path: KeyPath, *, at_key: bool = False) -> tuple[Layer, Span]:
        """Return the layer that has the last word on *path*, and the span there."""
        for layer in reversed(self.layers):
            if spot := layer.spots.get(path):
                return layer, _span(spot, at_key=at_key)
        in_files = [layer for layer in reversed(self.layers) if not layer.is_flag]
        for length in range(len(path) - 1, 0, -1):
            for layer in (*in_files, *reversed(self.layers)):
                if spot := layer.spots.get(path[:length]):
                    return layer, _span(spot, at_key=True)
        return (in_files or list(self.layers))[0], Span(0, 0)


def load(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Return the merged source of a job file; never raises for what a file or a flag holds."""
    reader = _Reader()
    reader.read(path, str(path), ())
    for override in overrides:
        reader.add_flag(override)
    raw: dict[str, Any] = {}
    for layer in reader.layers:
        raw = _merge(raw, layer.raw)
    for removed in reader.removed:
        _remove(raw, removed)
    return Source(raw, tuple(reader.layers), tuple(dict.fromkeys(reader.files)), tuple(reader.problems))


class _Reader:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.files: list[Path] = []
        self.problems: list[Diagnostic] = []
        self.removed: list[tuple[str, ...]] = []

    def read(self, path: Path, shown: str, chain: tuple[Path, ...]) -> None:
        """Add the layers of a file: what it extends first, then its own."""
        try:
            text = read_text(path, shown)
            raw = parse(text, shown)
            layer = Layer(shown, text, raw, index(text))
        except UnreadableError as error:
            self.problems.append(error.diagnostic)
            return
        self.files.append(path)
        bases = raw.pop("extends", [])
        if isinstance(bases, str):
            bases, paths = [bases], [KeyPath(("extends",))]
        elif isinstance(bases, list) and all(isinstance(base, str) for base in bases):
            paths = [("extends", number) for number in range(len(bases))]
        else:
            message = "extends must be the name of a file, or a list of names"
            self._complain(layer, ("extends",), codes.WRONG_TYPE, message, 'extends = "base.toml"')
            bases, paths = [], []
        for base, where in zip(bases, paths, strict=True):
            self._extend(layer, path, base, where, (*chain, path.resolve()))
        self.layers.append(layer)

    def _extend(self, layer: Layer, path: Path, base: str, where: KeyPath, chain: tuple[Path, ...]) -> None:
        target = path.parent / base
        shown = str(target)
        if "\0" in base or not base:
            self._complain(layer, where, codes.EXTENDS, "extends must be the name of a file")
        elif target.resolve() in chain:
            names = " -> ".join(each.name for each in (*chain[chain.index(target.resolve()) :], target))
            self._complain(layer, where, codes.EXTENDS, f"the files extend each other in a circle: {names}")
        elif len(self.files) >= _MOST_FILES:
            self._complain(layer, where, codes.EXTENDS, f"more than {_MOST_FILES} files are extended")
        elif not target.is_file():
            message = f'the file to extend does not exist: "{base}"'
            self._complain(
                layer,
                where,
                codes.EXTENDS,
                message,
                f"names are relative to {layer.shown}: looked for {shown}",
            )
        else:
            self.read(target, shown, chain)

    def _complain(
        self, layer: Layer, where: KeyPath, code: str, message: str, remedy: str | None = None
    ) -> None:
        span = _span(layer.spots[where], at_key=False)
        self.problems.append(at(code, message, file=layer.shown, text=layer.text, span=span, remedy=remedy))

    def add_flag(self, text: str) -> None:
        """Add the layer of one `--set key=value`."""
        found = _ASSIGNMENT.match(text)
        if not found:
            remedy = "write --set key=value, for example --set train.epochs=3"
            self.problems.append(
                at(
                    codes.BAD_SET,
                    "not of the form key=value",
                    file="--set",
                    text=text,
                    span=Span(0, len(text)),
                    remedy=remedy,
                )
            )
            return
        start = found.end()
        value = text[start:].strip()
        spots = index(f"{found[0]}0")
        path = max(spots, key=len)
        names = tuple(str(name) for name in path)
        if not value:
            self.removed.append(names)
            return
        try:
            leaf = self._leaf(text, value, start)
        except UnreadableError as error:
            self.problems.append(error.diagnostic)
            return
        if not isinstance(leaf, str):
            spots = index(text)
        spots[path] = Spot(spots[path].key, Span(start, len(text)))
        raw: dict[str, Any] = {names[-1]: leaf}
        for name in reversed(names[:-1]):
            raw = {name: raw}
        self.layers.append(Layer("--set", text, raw, spots, is_flag=True))

    @staticmethod
    def _leaf(text: str, value: str, start: int) -> Any:
        import tomli

        try:
            parsed = tomli.loads(f"v = {value}")
        except (ValueError, RecursionError) as error:
            if value[0] in "[{\"'":
                remedy = "quote it for your shell, for example --set 'dataset.args={ split = \"train\" }'"
                span = Span(start, len(text))
                message = "the value is not valid TOML"
                raise UnreadableError(
                    at(codes.BAD_SET, message, file="--set", text=text, span=span, remedy=remedy)
                ) from error
            return value  # a bare word: --set job.name=mnist
        if set(parsed) != {"v"}:
            return value
        if depth(parsed) > MOST_LEVELS:
            message = "the value is nested too deeply"
            raise UnreadableError(
                at(codes.NOT_TOML, message, file="--set", text=text, span=Span(start, len(text)))
            )
        return parsed["v"]


def _span(spot: Spot, *, at_key: bool) -> Span:
    first, second = (spot.key, spot.value) if at_key else (spot.value, spot.key)
    span = first or second
    assert span is not None  # every spot has one of the two
    return span


def _merge(weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
    merged = dict(weak)
    for key, value in strong.items():
        below = merged.get(key)
        both_tables = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(below, value) if both_tables else value  # type: ignore[arg-type]  # just checked
    return merged


def _remove(raw: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names[:-1]:
        raw = raw.get(name, {})
        if not isinstance(raw, dict):
            return
    raw.pop(names[-1], None)
