"""Keeps a node's compiler cache: says where it is, fills it before workers start, and saves it once they train."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.compiler_cache.node_folder import NodeFolder
from elasticflow.launcher.compiler_cache.transfer import Transfer, Transferred
from elasticflow.protocol import worker_environment
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.protocol.messages import report
from elasticflow.storage.storage import Storage
from elasticflow.system.installation import start_module
from elasticflow.system.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elasticflow.events import EventRecord
    from elasticflow.launcher.compiler_cache.transfer import Action
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.client.writer_process import WriterStart

# Variables that torch reads; a job or a user that sets one keeps a cache elsewhere, and alone.
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_LOOK_S = 0.2
_BUSY_PAUSE_S = 2.0
# Workers wait so long for a cache that is being loaded; without it they compile.
_LOAD_LIMIT_S = 30.0
_END_LIMIT_S = 10.0
_COMPILING = "compile"


def _is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether a user says where the cache is.

    torch 2.13 sets the variable itself once it has compiled something: a notebook, or a program that compiles and then
    starts a run, hands it down. Then it names torch's own folder, by the rule of `torch._inductor`'s `default_cache_dir`.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    own = Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    values = (environment.get(name) for name in VARIABLES)
    return any(value and not Path(value).is_relative_to(own) for value in values)


class CompilerCacheKeeper:
    """Fills and saves the cache of a node, in processes of their own; no failure of it ends a run.

    Args:
        node: Id of the node inside the launch; none of its workers runs.

    Attributes:
        folder: The node's folder, which is made, and holds no half written file; None: torch keeps its cache where it does by
            itself.
    """

    def __init__(
        self, run: RunFolder, node: str, writer: WriterStart, environment: Mapping[str, str]
    ) -> None:
        self._node, self._writer, self._kind = node, writer, this_machine()
        self.folder: NodeFolder | None = None
        self._told: list[EventRecord] = []
        if not _is_chosen(environment):
            self._make(NodeFolder(run.compiler_cache / self._kind.name / node))
        self._process: subprocess.Popen[bytes] | None = None
        self._action: Action = "load"
        self._is_first = self._is_dirty = self._has_run = False
        self._has_failed = self._has_not_loaded = False
        self._looked = self._not_before = 0.0

    def _make(self, folder: NodeFolder) -> None:
        reason = folder.why_unusable()
        if reason is None:
            try:
                folder.repair()
            except OSError as error:
                reason = str(error)
        if reason is None:
            self.folder = folder
        else:
            self._tell_failure("keep", reason)

    def variables(self) -> dict[str, str]:
        """Return the variables of the fork server and all that it starts: they have torch use the folder, and be ready to compile."""
        if self.folder is None:
            # The compiler is made ready beforehand all the same.
            return {worker_environment.COMPILER_CACHE: ""}
        path = self.folder.path
        values = (str(path), str(path / "triton"))
        return {**dict(zip(VARIABLES, values, strict=True)), worker_environment.COMPILER_CACHE: str(path)}

    def pids(self) -> set[int]:
        """Return the processes that work for the keeper."""
        return set() if self._process is None else {self._process.pid}

    def start_loading(self) -> None:
        """Begin to fill the folder from beside the snapshots, unless this node has a cache of its own."""
        if self.folder is not None and self.folder.sealed() is None:
            self._start("load")

    def begin(self, *, is_first: bool) -> None:
        """Have the folder ready for the workers of a generation, which is about to start; none runs on this node.

        Args:
            is_first: The node has rank 0.
        """
        self._is_first, self._is_dirty = is_first, True
        if self.folder is None:
            return
        if self._process is not None and self._action == "load":
            self._await(_LOAD_LIMIT_S)
        if self._has_run:
            try:
                self.folder.repair()
            except OSError as error:
                self._fail("keep", str(error))
        self._has_run = True

    def look(self, now: float, phases: Iterable[str]) -> list[EventRecord]:
        """Return events for the supervisor; save the cache if it is time by the monotonic *now*. To be called often while the workers run."""
        if self.folder is not None:
            phases = set(phases)
            self._is_dirty |= _COMPILING in phases
            if now - self._looked >= _LOOK_S:
                self._looked = now
                try:
                    self._look(now, bool(phases) and phases <= worker_environment.TRAINING_PHASES)
                except OSError as error:  # of the folder
                    self._fail("save", str(error))
        told, self._told = self._told, []
        return told

    def finish(self) -> list[EventRecord]:
        """Wait a moment for a cache that is being saved; return events for the supervisor."""
        if self._process is not None:
            self._await(_END_LIMIT_S)
        told, self._told = self._told, []
        return told

    def _look(self, now: float, are_training: bool) -> None:
        assert self.folder is not None
        if self._process is not None:
            if self._process.poll() is not None:
                self._take(now)
            return
        if self._is_dirty and are_training and not self._has_failed and now >= self._not_before:
            self._is_dirty = False
            if self.folder.has_news():
                self._start("save")

    def _start(self, action: Action) -> None:
        assert self.folder is not None
        self._action = action
        asked = Transfer(
            action=action,
            parent=os.getpid(),
            folder=str(self.folder.path),
            kind=self._kind.name,
            facts=self._kind.facts,
            uri=Storage(self._writer.uri).absolute_uri,
            prefix=self._writer.prefix,
            options=self._writer.settings.options,
            is_first=self._is_first or self._has_not_loaded,
        )
        try:
            self._process = start_module("elasticflow.launcher.compiler_cache.transfer")
        except OSError as error:
            self._fail(action, f"no process can be started: {error}")
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(to_json(asked).encode() + b"\n")

    def _await(self, limit_s: float) -> None:
        assert self._process is not None
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]
            self._process = None
            self._fail(self._action, f"not done within {limit_s:g} s")
            return
        self._take(time.monotonic())

    def _take(self, now: float) -> None:
        """Take in the result of the process that has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            text = stdout.read()
        code, self._process = self._process.wait(), None
        done = _done(text)
        if done is None:
            why = f"its process ended with code {code}; the log of {self._node}'s agent says why"
            self._fail(self._action, why)
            return
        match done.outcome:
            case "loaded" | "saved":
                self._told.append(
                    report(
                        events.COMPILER_CACHE,
                        node=self._node,
                        action=done.outcome,
                        files=done.files,
                        bytes=done.bytes,
                        seconds=done.seconds,
                    )
                )
            case "failed":
                self._fail(self._action, done.reason)
            case "busy":
                self._is_dirty, self._not_before = True, now + _BUSY_PAUSE_S
            case "none":
                pass

    def _fail(self, action: str, reason: str) -> None:
        # Told once: the next launch tries again.
        self._has_failed |= action == "save"
        # The archive beside the snapshots is useless to this kind of machine: it is replaced.
        self._has_not_loaded |= action == "load"
        self._tell_failure(action, reason)

    def _tell_failure(self, action: str, reason: str) -> None:
        self._told.append(report(events.COMPILER_CACHE_FAILED, node=self._node, action=action, reason=reason))


def _done(text: bytes) -> Transferred | None:
    """Return the result in a process' last line; libraries for stores may print, too. None if there is no result."""
    try:
        return from_json(Transferred, json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError):
        return None
