"""Job file, the files it extends, and `--set` -> one dict that remembers the place of each key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, Severity, diagnostic_at
from elasticflow.jobfile.diagnostics.positions import KeyPath, Span, spots_in
from elasticflow.jobfile.text.layers import (
    Layer,
    MovedLayer,
    Place,
    flag_layer,
    lay_over,
    span_of,
)
from elasticflow.jobfile.text.read import UnreadableError, near_files, parse_toml, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.jobfile.text.read import TomlTable

_MOST_FILES = 50


@dataclass(frozen=True)
class Source:
    """All layers of a job, weakest first, and their keys merged.

    Attributes:
        raw: The merged keys, `extends` left out.
        layers: Bases, then the job file, then its case, then one per `--set`.
        files: The job file and every file it extends, each once.
        problems: Errors of texts that could not be read; the other texts are merged nevertheless.
        written: `raw` before references were looked up; None: no references were looked up.
    """

    raw: TomlTable
    layers: tuple[Layer | MovedLayer, ...]
    files: tuple[Path, ...]
    problems: tuple[Diagnostic, ...]
    written: TomlTable | None = None

    def problem(
        self, code: str, message: str, path: KeyPath, *, at_key: bool = False, severity: Severity = "error", remedy: str | None = None,
        part: str | None = None,
    ) -> Diagnostic:  # fmt: skip
        """Return a diagnostic at the key or value that *path* names, or at the nearest table around it.

        *part*: the text within the value that the diagnostic is about.
        """
        layer, span = self.find(path, at_key=at_key)
        if part is not None and (at := layer.text.find(part, span.start, span.end)) >= 0:
            span = Span(at, at + len(part))
        diagnostic = diagnostic_at(
            code, message, file=layer.name, text=layer.text, span=span, severity=severity, remedy=remedy
        )
        return diagnostic if span.end else diagnostic._replace(excerpt=None)  # no line shows a missing key

    def find(self, path: KeyPath, *, at_key: bool = False) -> tuple[Layer, Span]:
        """Return the layer whose value of *path* wins, and the span there."""
        if place := self.look(path):
            return place[0], span_of(place[1], at_key=at_key)
        in_files = [layer for layer in reversed(self.layers) if layer.is_file]
        for length in range(len(path) - 1, 0, -1):
            for layer in (*in_files, *reversed(self.layers)):
                if place := layer.look(path[:length]):
                    return place[0], span_of(place[1], at_key=True)
        texts = [layer for layer in (*in_files, *self.layers) if isinstance(layer, Layer)]
        return texts[0], Span(0, 0)

    def look(self, path: KeyPath) -> Place | None:
        """Return the place of *path* in the layer whose value wins."""
        return next((place for layer in reversed(self.layers) if (place := layer.look(path))), None)


def load_source(
    path: Path, overrides: Sequence[str] = (), texts: Mapping[str, bytes] | None = None
) -> Source:
    """Return the merged source of a job file; never raises for the content of a file or a flag.

    Args:
        texts: Contents by real path, read in place of the files.
    """
    reader = _Reader(texts or {})
    reader.read(path, str(path), ())
    for override in overrides:
        reader.add_flag(override)
    raw: TomlTable = {}
    for layer in reader.layers:
        raw = lay_over(raw, layer)
    return Source(raw, tuple(reader.layers), tuple(reader.files), tuple(reader.problems))


class _Reader:
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts
        self.layers: list[Layer] = []
        self.files: list[Path] = []
        self.problems: list[Diagnostic] = []
        self._known: set[Path] = set()

    def read(self, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        """Add the layers of a file: first the files that it extends, then the file itself."""
        self._known.add(_real(path))
        try:
            text = read_text(path, name, self._texts.get(str(_real(path))))
            raw = parse_toml(text, name)
        except UnreadableError as error:
            found = error.diagnostic
            if chain and path.suffix != ".toml":
                # Any file can be named here, so its lines may be private.
                found = found._replace(excerpt=None, help="extends names job files, and these end in .toml")
            self.problems.append(found)
            return
        layer = Layer(name, text, raw, lambda: spots_in(text), is_file=True)
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
            self._extend(layer, path, base, where, (*chain, _real(path)))
        self.layers.append(layer)

    def _extend(self, layer: Layer, path: Path, base: str, where: KeyPath, chain: tuple[Path, ...]) -> None:
        if "\0" in base or not base:
            self._complain(layer, where, codes.EXTENDS, "extends must be the name of a file")
            return
        target = path.parent / base
        name, real = str(target), _real(target)
        if real in chain:
            names = " -> ".join(each.name for each in (*chain[chain.index(real) :], target))
            message = f"the files extend each other in a circle: {names}"
            self._complain(layer, where, codes.EXTENDS, message, "take one of these extends out")
        elif real in self._known:
            # A file that several bases extend counts once, below all of them: else the second would undo changes of the first.
            return
        elif len(self.files) >= _MOST_FILES:
            self._complain(layer, where, codes.EXTENDS, f"more than {_MOST_FILES} files are extended")
        elif not os.path.isfile(target):  # noqa: PTH113  # the method raises for names that are too long
            message = f'the file to extend does not exist: "{base}"'
            near = near_files(target)
            meant = f'did you mean "{(Path(base).parent / near[0]).as_posix()}"? ' if near else ""
            remedy = f"{meant}Names are relative to {layer.name}: looked for {name}"
            self._complain(layer, where, codes.EXTENDS, message, remedy)
        else:
            self.read(target, name, chain)

    def _complain(
        self, layer: Layer, where: KeyPath, code: str, message: str, remedy: str | None = None
    ) -> None:
        span = span_of(layer.spots[where], at_key=False)
        self.problems.append(
            diagnostic_at(code, message, file=layer.name, text=layer.text, span=span, remedy=remedy)
        )

    def add_flag(self, text: str) -> None:
        """Add the layer of one `--set key=value`."""
        try:
            self.layers.append(flag_layer(text))
        except UnreadableError as error:
            self.problems.append(error.diagnostic)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # the method raises for links that point at themselves
