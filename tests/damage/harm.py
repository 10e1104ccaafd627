"""Every damage to every file of a run, and what a command may answer to it: shared by the unit test and the campaign."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOB = """\
[job]
name = "tiny"
[model]
entry = "pieces:net"
loss = "torch.nn.functional:mse_loss"
[optimizer]
entry = "torch.optim:SGD"
args = { lr = 0.1 }
[dataset]
entry = "pieces:Data"
global_batch_size = 8
[train]
steps = 60
[snapshots]
every = "10 steps"
keep = { last = 9 }
[nodes]
nproc_per_node = 1
"""
PIECES = """\
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if os.path.exists("slow"):
            time.sleep(0.01)
        return torch.tensor([i / 64.0]), torch.tensor([2 * i / 64.0])


def net():
    return nn.Linear(1, 1)
"""
RUN, NAME = "r", "tiny"
FOLDER = Path("runs") / NAME / RUN
COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status", RUN),
    "runs": ("runs",),
    "why": ("why", RUN),
    "logs": ("logs", RUN),
    "metrics": ("metrics", RUN),
    "metrics --plot": ("metrics", RUN, "--plot"),
    "report": ("report", RUN, "-o", "report.html"),
    "snapshots list": ("snapshots", "list", RUN),
    "snapshots show": ("snapshots", "show", RUN),
    "snapshots verify": ("snapshots", "verify", RUN, "--all"),
    "run --run-id": ("run", "jobs/tiny.toml", "--run-id", RUN),
    "resume": ("resume", RUN),
}
# Takes long: tried on what it opens, with damages that differ from each other.
SLOW = {"report": ("deleted", "cut", "not UTF-8", "a directory", "unreadable")}
LAUNCHING = ("run --run-id", "resume")
_LOOKING_AT_SNAPSHOTS = ("snapshots list", "snapshots show", "snapshots verify")
_ZEROED = 300


def write_project(root: Path) -> None:
    """Put the job and its code into *root*."""
    (root / "jobs").mkdir(parents=True)
    (root / "jobs" / "tiny.toml").write_text(JOB)
    (root / "pieces.py").write_text(PIECES)
    (root / "pyproject.toml").write_text("")


def _containing(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return what changes a file's content."""

    def do(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return do


def _zero(path: Path) -> None:
    data = path.read_bytes()
    kept = data[: max(0, len(data) - _ZEROED)]
    path.write_bytes(kept + bytes(len(data) - len(kept)))


def _no_utf8(path: Path) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"\xff\xfe\x80" + data[middle:])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data), 97):
        data[at] ^= 0x15
    path.write_bytes(bytes(data))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "stranger").write_text("what lies here is not ours")


def _unreadable(path: Path) -> None:
    path.chmod(0)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": _containing(lambda _: b""),
    "null": _containing(lambda _: b"null\n"),
    "[1]": _containing(lambda _: b"[1]\n"),
    "300 bytes zeroed": _zero,
    "cut": _containing(lambda data: data[: len(data) // 2]),
    "not UTF-8": _no_utf8,
    "bits flipped": _flip,
    "a directory": _directory,
    "unreadable": _unreadable,
}


CHANGES_BYTES = frozenset(DAMAGES) - {"deleted", "emptied", "a directory", "unreadable"}
"""Damages that only what reads the file can notice; the others change what a look at the folder says as well."""


def files_of(root: Path) -> list[Path]:
    """Return every file of the run, relative to its folder."""
    folder = root / FOLDER
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def kind_of(file: Path) -> str:
    """Return what the table calls *file*: names of snapshots and digits are left out."""
    text = re.sub(r"\d{12}-\d{4}-[0-9a-f]{8}", "NAME", file.as_posix())
    return re.sub(r"\d{4,5}", "NNNN", text)


def copy_of(original: Path, to: Path) -> Path:
    """Return a copy of the project."""
    shutil.copytree(original, to, symlinks=True)
    return to


def heal(original: Path, copy: Path) -> None:
    """Make *copy* equal to *original* again: what a command or a damage has changed, added or removed is undone."""
    for folder, folders, files in os.walk(copy):
        place = original / Path(folder).relative_to(copy)
        for name in [*folders]:
            if not (place / name).is_dir():
                folders.remove(name)
                shutil.rmtree(Path(folder) / name)
        for name in files:
            if not (place / name).is_file():
                (Path(folder) / name).unlink()
    for folder, folders, files in os.walk(original):
        place = copy / Path(folder).relative_to(original)
        for name in folders:
            (place / name).mkdir(exist_ok=True)
        for name in files:
            whole, there = (Path(folder) / name).stat(), place / name
            found = there.stat() if there.exists() else None
            if found is None or (found.st_size, found.st_mtime_ns) != (whole.st_size, whole.st_mtime_ns):
                shutil.copy2(Path(folder) / name, there)


def claims_of(root: Path) -> int:
    """Return how many generations are claimed, or were by now."""
    folder = root / FOLDER / "generations"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def snapshots_of(root: Path) -> list[str]:
    """Return the names of the run's snapshots, the newest first."""
    return sorted((path.name for path in (root / FOLDER / "snapshots").iterdir()), reverse=True)


def expected_of(names: list[str], file: Path) -> str:
    """Return the newest of *names*, the newest first, that damage to *file* leaves whole."""
    return next(name for name in names if file.parts[:2] != ("snapshots", name))


@dataclass(frozen=True)
class Answer:
    """What a command came to.

    Attributes:
        code: Exit code; None if it ended in a traceback.
        said: All that it printed.
        went_on_from: The snapshot that a launch resumed from; None if it resumed from none.
        claimed: Generations that it claimed.
    """

    code: int | None
    said: str
    went_on_from: str | None = None
    claimed: int = 0


def problem_of(command: str, file: Path, answer: Answer, expected: str) -> str | None:
    """Return what is wrong with an answer; None if it is as people may expect.

    A launch resumes from the newest snapshot that is whole, or is refused with exit 2, naming file and remedy, before a
    generation is claimed. What only looks does so with what is left, or is refused in the same way; for one damaged
    snapshot the others are not withheld.
    """
    if answer.code is None or "Traceback" in answer.said:
        return f"a traceback: {answer.said.strip().splitlines()[-1:]}"
    if answer.code == 2:
        if command in _LOOKING_AT_SNAPSHOTS and file.parts[0] == "snapshots":
            return "refused, though the other snapshots can be shown"
        if file.name not in answer.said and str(file.parent.name) not in answer.said:
            return "refused without naming the file"
        if "help:" not in answer.said:
            return "refused without a remedy"
        return "refused, and a generation was claimed" if answer.claimed else None
    if command in LAUNCHING:
        if answer.code != 0:
            return f"ended with {answer.code}"
        if answer.went_on_from != expected:
            return f"resumed from {answer.went_on_from}, not {expected}"
        return None
    if answer.code == 1 and command == "snapshots verify":
        return None if file.parts[0] == "snapshots" else "said a whole snapshot is damaged"
    return None if answer.code == 0 else f"ended with {answer.code}"


def outcome_of(command: str, answer: Answer) -> str:
    """Return an answer in a word or two, for the table."""
    if answer.code == 2:
        return "refused"
    if command in LAUNCHING and answer.went_on_from:
        return f"on from step {int(answer.went_on_from.split('-')[0])}"
    return "damage named" if answer.code == 1 else "shown"


def bad_lines(path: Path) -> Iterator[str]:
    """Yield what is no record in a file of JSON lines."""
    for line in path.read_bytes().splitlines():
        try:
            json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            yield repr(line[:80])


def steps_of(path: Path) -> list[int]:
    """Return the steps of a file of metrics, in its order."""
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]
