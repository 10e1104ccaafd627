"""Gathers the facts of a report from a run's folder; missing or damaged parts are left out."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli

from elasticflow.compiler.launch_folder import source_copy
from elasticflow.jobfile.text.layers import leaves, table_at
from elasticflow.observe.curves import curve_of, read_curves
from elasticflow.observe.history import RunHistory
from elasticflow.observe.incidents import incidents, note_rows
from elasticflow.observe.records import damages_of, read
from elasticflow.observe.status import read_status
from elasticflow.protocol.points import read_points
from elasticflow.report.timeline import Timeline
from elasticflow.system import records
from elasticflow.system.records import printable, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.observe.curves import Curve
    from elasticflow.observe.history import Generation, SnapshotEvent, Stop
    from elasticflow.observe.status import RunStatus
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

DEFAULT = "default"


@dataclass(frozen=True)
class LogFile:
    """A log, by its path from the report."""

    name: str
    path: str
    bytes: int


@dataclass(frozen=True)
class RunFacts:
    """A run, as its report shows it.

    Attributes:
        curves: Curves of the metrics, then of the numbers that hooks logged.
        incidents: Failures, oldest first.
        generations: Oldest first.
        ledger: Lines of the restart budget.
        notes: Warnings for the reader (`note_rows`), and damaged records.
        case: Case of a file with [matrix]; None for other files.
    """

    status: RunStatus
    curves: Sequence[Curve]
    timeline: Timeline
    incidents: Sequence[Stop]
    generations: Sequence[Generation]
    snapshots: Sequence[SnapshotEvent]
    ledger: Sequence[Mapping[str, Any]]
    keys: Sequence[JobKey]
    environment: Mapping[str, str]
    data: Mapping[str, Mapping[str, Any]]
    logs: Sequence[LogFile]
    logged: Sequence[Logged]
    notes: Sequence[str]
    case: str | None
    lost_steps: int

    @property
    def name(self) -> str:
        """Job and run id."""
        return f"{self.status.folder.job} {self.status.folder.run_id}"


def facts_of(folder: RunFolder, target: Path) -> RunFacts:
    """Return the facts of the run in *folder* for the report at *target*."""
    history = RunHistory.read(folder)
    notes = [*(text for _, text in note_rows(history)), *map(str, damages_of(folder))]
    environment, data = _environment(folder)
    status = read_status(folder)
    # A run may report nothing for hours, and continue.
    seconds = sum(status.durations.values()) if status.status == "running" else 0.0
    points = read_points(folder.path)
    return RunFacts(
        status=status,
        curves=[*read_curves(folder.metrics, folder.metrics_redone), *scalars_of(points)],
        timeline=Timeline.of(history, seconds),
        incidents=incidents(folder, history),
        generations=[each for _, each in sorted(history.generations.items())],
        snapshots=[each for each in history.snapshots if each.state == "committed"],
        ledger=list(read(folder.ledger)),
        keys=keys_of(folder),
        environment=environment,
        data=data,
        logs=_logs(folder, target),
        logged=logged_in(folder, points),
        notes=notes,
        case=case_of(folder),
        lost_steps=history.redone,
    )


def case_of(folder: RunFolder) -> str | None:
    """Return the case of [matrix] that the run trains, as the record of its newest launch says."""
    return text_of(_recorded(folder, "job.json"), "case")


def _recorded(folder: RunFolder, name: str) -> Record:
    """Return a record of the newest launch; empty if it cannot be read."""
    launch = folder.newest_launch
    record = None if launch is None else records.read(launch / name)
    return record if isinstance(record, dict) else {}


def _environment(folder: RunFolder) -> tuple[dict[str, str], dict[str, Mapping[str, Any]]]:
    """Return facts of the newest launch: machine, libraries and checkout; and of each data set."""
    job, worker = (_recorded(folder, name) for name in ("job.json", "environment.json"))
    found: dict[str, str] = {}
    for table in (job.get("machine"), worker.get("device"), job.get("versions"), worker.get("versions")):
        for name, value in (table if isinstance(table, dict) else {}).items():
            if value not in (None, [], ""):
                found.setdefault(
                    str(name), ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                )
    git = job.get("git")
    for name, value in (git if isinstance(git, dict) else {}).items():
        if isinstance(value, str | int | bool):
            found[f"git {name}"] = str(value)
    data = worker.get("datasets")
    return found, {str(k): v for k, v in data.items() if isinstance(v, dict)} if isinstance(
        data, dict
    ) else {}


def _logs(folder: RunFolder, target: Path) -> list[LogFile]:
    logs = folder.path / "logs"
    found = []
    for path in sorted(logs.rglob("*")) if logs.is_dir() else ():
        try:
            size = path.stat().st_size if path.is_file() else 0
        except OSError:  # the file was removed meanwhile
            continue
        if size:
            relative = os.path.relpath(path, target.resolve().parent)
            found.append(LogFile(path.relative_to(logs).as_posix(), Path(relative).as_posix(), size))
    return found


@dataclass(frozen=True)
class JobKey:
    """A key of the resolved job.

    Attributes:
        value: Value in JSON.
        origin: The file that sets it, `--set`, or `DEFAULT`.
        overrides: True if a file that this origin extends sets the key, too.
    """

    name: str
    value: str
    origin: str
    overrides: bool = False


def keys_of(folder: RunFolder) -> list[JobKey]:
    """Return the keys of the newest launch's job; empty if its record cannot be read."""
    launch, record = folder.newest_launch, _recorded(folder, "job.json")
    if launch is None or not isinstance(record.get("job"), dict):
        return []
    layers = _layers(launch, record)
    return [
        JobKey(name, json.dumps(value, ensure_ascii=False), *_origin(name, layers))
        for name, value in _named(record["job"]).items()
    ]


def _layers(launch: Path, record: Mapping[str, Any]) -> list[tuple[str, set[str]]]:
    """Return the origins of keys, the strongest first, each with the keys it sets."""
    overrides = record.get("overrides")
    words = overrides if isinstance(overrides, list) else []
    layers = [("--set", {str(word).partition("=")[0].strip() for word in words})] if words else []
    files, case = record.get("files"), text_of(record, "case")
    for file in files if isinstance(files, list) else []:
        try:
            table = tomli.loads((launch / source_copy(str(file))).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        given = {} if case is None else table_at(table, "matrix", "cases", case)
        of_case = given or ({} if case is None else table_at(table, "matrix", "axes"))
        layers.append((str(file), {*_named(table), *_named(of_case)}))
    return layers


def _origin(name: str, layers: list[tuple[str, set[str]]]) -> tuple[str, bool]:
    setters = [origin for origin, names in layers if _sets(name, names)]
    return (setters[0], len(setters) > 1) if setters else (DEFAULT, False)


def _sets(name: str, names: set[str]) -> bool:
    """Return True if one of *names* is this key, or a table above it that was set as a whole."""
    parts = name.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in leaves(table)}


Point = dict[str, Any]
_MOST_SHOWN = 12
"""Most texts or images of one name; the first and the newest are among them."""
_MOST_BYTES = 1_500_000
"""Most bytes of all images in a report."""
_MOST_CHARACTERS = 20_000
"""Most characters of one text."""
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Shown:
    """A text, or an image as a data URL."""

    step: int
    rank: int
    value: str


@dataclass(frozen=True)
class Logged:
    """Texts or images that a hook logged under one name.

    Attributes:
        shown: The texts or images to show, the newest first.
        count: Number of all logged texts or images.
    """

    name: str
    kind: Literal["text", "image"]
    shown: Sequence[Shown]
    count: int


def scalars_of(points: Iterable[Point]) -> list[Curve]:
    """Return the numbers that rank 0, or else the first rank with any, has logged, as curves by name."""
    by_name = _by_name(points, "scalar")
    curves = []
    for name, found in by_name.items():
        rank = min(point["rank"] for point in found)
        values = [
            (point["step"], point["generation"], _number(point)) for point in found if point["rank"] == rank
        ]
        curves.append(curve_of(name, values))
    return curves


def logged_in(folder: RunFolder, points: Sequence[Point]) -> list[Logged]:
    """Return texts and images of a run; images that are missing or not readable are left out."""
    found = [
        Logged(name, "text", [_text(point) for point in _chosen(of_name)], len(of_name))
        for name, of_name in _by_name(points, "text").items()
    ]
    left = _MOST_BYTES
    for name, of_name in _by_name(points, "image").items():
        shown = []
        for point in _chosen(of_name):
            data = _image(folder, point)
            if data is not None and len(data) <= left:
                left -= len(data)
                url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
                shown.append(Shown(point["step"], point["rank"], url))
        found.append(Logged(name, "image", shown, len(of_name)))
    return found


def _by_name(points: Iterable[Point], kind: str) -> Mapping[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.get("kind") == kind:
            found.setdefault(point["name"], []).append(point)
    return found


def _chosen(points: Sequence[Point]) -> list[Point]:
    """Return some of the points, evenly over all, the newest first."""
    last = len(points) - 1
    count = min(len(points), _MOST_SHOWN)
    return [points[round(last * i / max(1, count - 1))] for i in reversed(range(count))]


def _number(point: Point) -> float | None:
    value = point.get("value")
    return float(value) if isinstance(value, int | float) else None


def _text(point: Point) -> Shown:
    text = str(point.get("value"))
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return Shown(point["step"], point["rank"], "\n".join(map(printable, cut.splitlines())))


def _image(folder: RunFolder, point: Point) -> bytes | None:
    path = folder.path / str(point.get("value"))
    try:
        if not path.resolve().is_relative_to(folder.path.resolve()):
            return None
        data = path.read_bytes()
    except (OSError, ValueError):
        return None
    return data if data.startswith(_PNG) else None
