"""Damage ends nothing: every file of a run times every damage times every command.

A launch resumes from the newest snapshot that is whole, or is refused with file and remedy before anything is claimed;
what only looks never ends in a traceback. `tests/measured/campaign/damage.py` does the same with real processes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.provenance import origins
from elasticflow.jobfile import validate_source
from tests.damage import harm, made_run

if TYPE_CHECKING:
    from collections.abc import Iterator

# As `test_the_table_names_every_file` finds them.
KINDS = (
    "JOB.json", "events.jsonl", "generations/NNNN.json", "launches/NNNN/environment.json", "launches/NNNN/job.json",
    "launches/NNNN/plan.json", "launches/NNNN/sources/jobs/tiny.toml", "launches/NNNN/sources/pieces.py",
    "launches/NNNN/torchrun.args", "launches/NNNN/torchrun.sh", "launches/NNNN/train.py", "ledger.jsonl", "lock",
    "logs/agent.log", "logs/gNNNN/rank0.jsonl", "logs/gNNNN/rank0.stderr", "logs/gNNNN/rank0.stdout", "metrics.jsonl",
    "pins/NAME.json", "snapshots/NAME/MANIFEST.json", "snapshots/NAME/shard-NNNN-of-NNNN.safetensors",
    "snapshots/NAME/state.json", "state.json", "verdicts/NAME.json",
)  # fmt: skip


class Opened:
    """Which files this process opens, as long as it is asked."""

    def __init__(self) -> None:
        self.paths: set[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.paths is not None and isinstance(arguments[0], str):
            self.paths.add(str(Path(arguments[0]).absolute()))

    def by(self, command: str, root: Path) -> set[Path]:
        """Return what *command* opens of the run in *root*, relative to its folder."""
        self.paths = set()
        try:
            made_run.ask(command)
        finally:
            found, self.paths = self.paths, None
        folder = (root / harm.FOLDER).absolute()
        return {Path(path).relative_to(folder) for path in found if Path(path).is_relative_to(folder)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a project with a run that was interrupted after its third snapshot."""
    root = tmp_path_factory.mktemp("damage") / "original"
    with pytest.MonkeyPatch.context() as patch:
        made_run.make(root, patch)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def copy(original: Path) -> Path:
    """Return the project that is damaged and healed again."""
    return harm.copy_of(original, original.parent / "copy")


@pytest.fixture(autouse=True)
def _decided_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut launches short once they have decided from where they continue; what takes long and matters not is left out."""
    made_run.cut_short(monkeypatch)
    monkeypatch.setattr(validate_source, "check_entry_points", lambda *_: [])
    monkeypatch.setattr(origins, "git_state", lambda _: None)
    versions = origins.versions()
    monkeypatch.setattr(origins, "versions", lambda _=(): versions)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def _refuse_to_open(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Have this process fail to open *path*, as one that may not: root may open anything."""
    opening, access = os.open, os.access

    def fail(target: Any) -> None:
        if isinstance(target, str | os.PathLike) and os.fspath(target) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for module in (io, builtins):
        real = module.open

        def opened(file: Any, *arguments: Any, _real: Any = real, **options: Any) -> Any:
            fail(file)
            return _real(file, *arguments, **options)

        patch.setattr(module, "open", opened)

    def os_open(target: Any, *arguments: Any, **options: Any) -> int:
        fail(target)
        return opening(target, *arguments, **options)

    patch.setattr(os, "open", os_open)
    patch.setattr(os, "access", lambda target, mode: Path(target) != path and access(target, mode))


def test_the_table_names_every_file(original: Path) -> None:
    """A file that a run begins to keep belongs into the table."""
    assert sorted({harm.kind_of(file) for file in harm.files_of(original)}) == sorted(KINDS)


@pytest.fixture(scope="module")
def opened(original: Path, copy: Path) -> dict[str, set[Path]]:
    """Return the files of a run without damage that each command opens."""
    found, eye = {}, Opened()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy)
        made_run.cut_short(patch)
        for command in harm.COMMANDS:
            found[command] = eye.by(command, copy)
            harm.heal(original, copy)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_damage_ends_nothing(
    original: Path, copy: Path, opened: dict[str, set[Path]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of several files of a kind, the one of the newest snapshot is damaged, then the one of the oldest."""
    files = [file for file in harm.files_of(original) if harm.kind_of(file) == kind]
    whole = [name for name in harm.snapshots_of(original) if int(name.split("-")[0]) >= made_run.EVERY]
    problems = []
    monkeypatch.chdir(copy)
    for file in dict.fromkeys((files[-1], files[0])):
        for damage in harm.DAMAGES:
            is_harmed = False
            for command in _commands(kind):
                if _tells_nothing(command, damage, is_opened=file in opened[command]):
                    continue
                if not is_harmed and damage != "unreadable":
                    harm.DAMAGES[damage](copy / harm.FOLDER / file)
                is_harmed = True
                claimed = harm.claims_of(copy)
                with monkeypatch.context() as patch:
                    if damage == "unreadable":
                        _refuse_to_open(copy / harm.FOLDER / file, patch)
                    answer = made_run.ask(command)
                assert harm.claims_of(copy) == claimed
                problem = harm.problem_of(command, file, answer, harm.expected_of(whole, file))
                if command in harm.LAUNCHING and answer.code == 0:
                    problem = problem or _gap_in(copy / harm.FOLDER / "metrics.jsonl", answer.went_on_from)
                if problem:
                    problems.append(f"{file} | {damage} | {command}: {problem}\n{answer.said}")
                if command in harm.LAUNCHING:
                    harm.heal(original, copy)
                    is_harmed = False
            harm.heal(original, copy)
    assert not problems, "\n".join(problems)


def _tells_nothing(command: str, damage: str, *, is_opened: bool) -> bool:
    """Return whether a command cannot notice a damage, or takes too long to be tried on it."""
    if command in harm.SLOW:
        return not is_opened or damage not in harm.SLOW[command]
    # A launch asks for its permission as well.
    is_of_content = damage in harm.CHANGES_BYTES or (damage == "unreadable" and command not in harm.LAUNCHING)
    return is_of_content and not is_opened


def _commands(kind: str) -> list[str]:
    """Return the commands that are tried: `resume` differs from `run --run-id` in what it reads first, and in no more."""
    reads_first = kind.startswith(("launches", "JOB", "state", "lock"))
    return [command for command in harm.COMMANDS if reads_first or command != "resume"]


def _gap_in(metrics: Path, snapshot: str | None) -> str | None:
    """Return what is wrong with the metrics up to *snapshot*: lines that are no record, steps that are not there."""
    if bad := list(harm.bad_lines(metrics)):
        return f"metrics.jsonl keeps {bad}"
    steps = harm.steps_of(metrics)
    last = int((snapshot or "0-").split("-")[0])
    return None if steps == list(range(1, last + 1)) else f"metrics.jsonl has the steps {steps}"
