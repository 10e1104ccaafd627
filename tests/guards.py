"""What a unit test may not do: start processes, or write outside its temporary folder."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Caches of the tools at work, not of the code under test; devices hold nothing.
_TOOLS = ("__pycache__", ".hypothesis", ".pytest_cache", "torchinductor_")
# Questions to the machine and the checkout: `ctypes.util.find_library`, `platform`, the compiler's git state.
_QUESTIONS = frozenset({"ldconfig", "gcc", "cc", "ld", "uname", "file", "lscpu", "git"})


class Guard:
    """An audit hook that fails the test at the forbidden call; quiet between tests.

    An audit hook sees every way to open a file or to start a process, whatever was imported by which name,
    and cannot be removed: one is added per session, before its first unit test.
    """

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] | None = None
        self._hears = False

    @contextmanager
    def watch(self, *folders: Path) -> Iterator[None]:
        """Bite inside the `with`, except for writes under paths that begin with one of *folders*."""
        self._allowed = tuple(os.path.realpath(folder) for folder in folders)
        if not self._hears:
            sys.addaudithook(self._hear)
            self._hears = True
        try:
            yield
        finally:
            self._allowed = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._allowed is None:
            return
        if event in _STARTS:
            if event == "subprocess.Popen" and os.path.basename(os.fsdecode(args[0])) in _QUESTIONS:  # noqa: PTH119
                return
            self._fail(f"a unit test started a process ({event})")
        elif event == "open" and isinstance(args[0], str | bytes) and args[2] & _WRITES:
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith((*self._allowed, "/dev/", "/proc/")) and not any(
                t in path for t in _TOOLS
            ):
                self._fail(f"a unit test wrote outside its temporary folder: {path}")

    def _fail(self, what: str) -> None:
        self._allowed = None  # the report may open what it likes
        pytest.fail(f"{what}; mark it e2e or integration, or ask for the fixture `real_processes`")


def temporary_folders(config: pytest.Config) -> tuple[Path, ...]:
    """Return where unit tests write: pytest's own base folder and nameless files of `tempfile`."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    return Path(factory.getbasetemp()), Path(tempfile.gettempdir()) / "tmp"
