"""Faults on cue: named points in the code where a test kills, stops, delays or fails the process.

For tests: `reach("point")` does nothing unless the process' main has armed the point from the environment variable
`ELASTICFLOW_FAULTS`, a list of clauses, which is no part of the command's interface:

    commit.before_manifest=kill@2, shares.mid_write=stall:3@1 rank=0, storage.write=raise:ENOSPC@3-5 cue=/tmp/cue

A clause names a point and an act:

    kill         SIGKILL to this process
    stop         SIGSTOP to this thread
    stall:S      sleep S seconds
    raise:ERRNO  raise that OSError
    flip         flip a bit of what the process exposed

Without more the clause acts at every arrival in every process. `@N` or `@N-M` limits it to these arrivals in a process,
`rank=R` to a worker, `generation=G` to a generation's workers. With `cue=PATH` it acts only if that file exists, and
renames it to PATH.<process id> first: it acts once, and the test knows in which process.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VARIABLE = "ELASTICFLOW_FAULTS"

POINTS = {
    # A worker trains.
    "training.step": "a step is finished and reported, nothing of a snapshot has begun",
    # A worker takes a snapshot.
    "snapshot.before_capture": "the state is about to be read; also once after the first step, to learn its size",
    "snapshot.after_capture": "the state was read, nothing is copied",
    "snapshot.mid_copy": "half of the tensors are copied into staging memory",
    "snapshot.after_copy": "all is copied, the writer does not know it",
    "snapshot.after_stage": "the share was handed to the writer",
    "tier.before_seal": "a slot of the memory tier is filled, it does not count yet",
    # A worker resumes from one.
    "tier.before_receive": "a worker asked the writer for memory for another node's state",
    "tier.mid_broadcast": "before each piece of a held state goes to nodes that lack it",
    "restore.before_recall": "the writer is not asked what it holds in memory",
    "restore.before_read": "the candidates are known, none was read",
    "restore.mid_load": "the writer, or who verifies, is about to read a block",
    "restore.before_apply": "a snapshot is read and verified on every rank",
    "restore.mid_apply": "before each part of the live state (model, optimizer ...) takes its content",
    # The writer takes a share and writes it.
    "writer.hello": "a worker greeted, it has no answer",
    "writer.before_settle": "a new generation is here, older snapshots may be open",
    "writer.reserve": "a worker asked for staging memory",
    "writer.received": "a share was handed over, nothing of it is on the store",
    "shares.before_write": "a share is about to be written",
    "shares.mid_write": "before each piece of a share goes to the store",
    "shares.after_write": "a share is on the store",
    "shares.before_state": "rank 0's share is on the store, state.json is not",
    "shares.after_state": "state.json is on the store",
    # The writer commits.
    "commit.settled": "all shares of this node are on the store or failed",
    "commit.before_fence": "the record is made, the fence is not asked",
    "commit.before_manifest": "all files are checked, there is no manifest",
    "commit.before_rename": "the manifest is in the hidden folder (local disks only)",
    "commit.committed": "the snapshot is committed, nobody was told",
    "commit.told": "the commit was reported, retention is to come",
    # Retention.
    "retention.before": "it is known what goes, nothing is removed",
    "retention.between": "a snapshot's manifest is removed, its files are not",
    "retention.before_sweep": "what retention does not keep is removed, leftovers are not",
    # Any file.
    "storage.write": "a file is about to be written",
    "storage.create": "a file is about to be made if it is not there",
    "storage.read": "a file is about to be opened or read",
    "storage.remove": "a file or folder is about to be removed",
}

_ACT = rf"kill|stop|stall:(?P<seconds>\d+(\.\d+)?)|raise:(?P<name>{'|'.join(errno.errorcode.values())})|flip"
_CLAUSE = re.compile(
    rf"(?P<point>[a-z_]+\.[a-z_]+)=(?P<act>{_ACT})"
    r"(@(?P<first>\d+)(-(?P<last>\d+))?)?(\s+rank=(?P<rank>\d+))?(\s+generation=(?P<generation>\d+))?"
    r"(\s+cue=(?P<cue>\S+))?"
)


@dataclass
class _Fault:
    act: str
    seconds: float
    error: str
    first: int | None
    last: int | None
    cue: str | None
    arrivals: int = 0

    def arrive(self, point: str) -> None:
        """Count an arrival at *point*, and act if the clause says so now."""
        with _lock:  # released before the act: a stall delays its own thread only
            self.arrivals += 1
            is_meant = self.first is None or self.first <= self.arrivals <= (self.last or self.first)
        if is_meant and (self.cue is None or _take(self.cue)):
            self._act(point)

    def _act(self, point: str) -> None:
        match self.act:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # To this very thread: a signal to the process lets it run on until another thread has taken it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "stall":
                time.sleep(self.seconds)
            case "flip":
                for action in _exposed:
                    action()
            case _:
                code = getattr(errno, self.error)
                raise OSError(code, f"{os.strerror(code)} (at {point}, on cue)")


_armed: dict[str, list[_Fault]] = {}
_exposed: list[Callable[[], None]] = []
_lock = threading.Lock()


def arm(environment: Mapping[str, str]) -> None:
    """Have exactly the points act that `ELASTICFLOW_FAULTS` in *environment* names.

    Raises:
        ValueError: a clause is not understood, or names no point.
    """
    _armed.clear()
    for clause in filter(None, map(str.strip, environment.get(VARIABLE, "").split(","))):
        match = _CLAUSE.fullmatch(clause)
        if match is None or match["point"] not in POINTS:
            raise ValueError(f"{VARIABLE}: cannot act on `{clause}`")
        variables = {"rank": "RANK", "generation": "ELASTICFLOW_GENERATION"}
        if any(match[key] not in (None, environment.get(name)) for key, name in variables.items()):
            continue
        first, last = (None if match[key] is None else int(match[key]) for key in ("first", "last"))
        act, seconds = match["act"].partition(":")[0], float(match["seconds"] or 0)
        fault = _Fault(act, seconds, match["name"] or "", first, last, match["cue"])
        _armed.setdefault(match["point"], []).append(fault)


def is_act(text: str) -> bool:
    """Return whether a process can do *text* at a point: `kill`, `raise:ENOSPC`."""
    return re.fullmatch(_ACT, text) is not None


def expose(action: Callable[[], None]) -> None:
    """Have the act `flip` call *action*, which flips a bit of what this process holds."""
    _exposed.append(action)


def reach(point: str) -> None:
    """Act at *point*, a key of POINTS, if a test asked for it; otherwise this costs one look at an empty dict."""
    if _armed:
        for fault in _armed.get(point, ()):
            fault.arrive(point)


def _take(cue: str) -> bool:
    """Take the cue file away; return whether this process has it: another one may have been first."""
    try:
        os.rename(cue, f"{cue}.{os.getpid()}")  # noqa: PTH104  # one act, so that one process has it
    except FileNotFoundError:
        return False
    return True
