"""Finds the first failure of a generation, and its class; pure."""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import COLLECTIVE_MISMATCH, DeviceError
from elasticflow.launcher.restarts.failure_classes import CLASSES, FAILURES
from elasticflow.protocol.messages import WorkerEnd
from elasticflow.system.device_errors import class_of_device_error, is_kernel_fault
from elasticflow.system.exceptions import type_name
from elasticflow.system.processes import FAULTS, signal_or_code
from elasticflow.system.records import unix_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.launcher.restarts.failure_classes import FailureClass

# Texts of collectives that fail when another rank died. gloo and NCCL raise plain RuntimeErrors, so only the text tells.
_PEER = re.compile(
    r"connection (?:was )?(?:closed by (?:remote )?peer|reset by peer|refused)|broken pipe|socket closed"
    r"|gloo|nccl|DistNetworkError|DistStoreError|remote process exited|timed out waiting \d+ ?ms for (?:recv|send)",
    re.IGNORECASE,
)
# Words of NCCL's threads before they abort a process whose peer is gone (strings of libtorch_cuda.so 2.14 and of NCCL
# 2.30). Without a peer that raised anything: a worker waits in CUDA, where no exception can reach it.
_PEER_ABORT = re.compile(
    r"remote process exited or there was a network error|\bnccl(?:Remote|System)Error\b"
    r"|Observed flight recorder dump signal from another rank"
)
# The same threads, once a collective has taken longer than it may, or a call of CUDA does not return.
_HANG_ABORT = re.compile(
    r"Watchdog caught collective operation timeout|ProcessGroupNCCL's watchdog got stuck for \d+ seconds"
)
# The exit code of argparse, click and typer for a program that was called wrongly.
_USAGE = re.compile(r"^usage: ", re.IGNORECASE | re.MULTILINE)
_USAGE_ERROR = re.compile(r"^(?:\S+: )?error: .+$", re.IGNORECASE | re.MULTILINE)
_USAGE_CODE = 2
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_LONGEST_ERROR = 500
# As faulthandler writes them when the process is hit by SIGSEGV, SIGABRT and the like. A progress bar may stand before it.
_FATAL = re.compile(r"Fatal Python error: .*$", re.MULTILINE)
_CURRENT = re.compile(r"^Current thread .*((?:\n  File .*)+)", re.MULTILINE)
_THREAD = re.compile(r"^Thread .*((?:\n  File .*)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line \d+,? in (.+)$', re.MULTILINE)
# As the C++ runtime writes it when no one catches an exception.
_TERMINATE = re.compile(
    r"^terminate called after throwing an instance of '(.+)'(?:\n  what\(\):  (.*))?", re.MULTILINE
)
_MISMATCH = (
    "the ranks took part in different collectives; help: every rank calls the model equally often and leaves its loop after the "
    "same step, also where it stops by its own loss (in a loop on elasticflow.join run.stop(reason) ends training on all)"
)
_ENFORCE = re.compile(r"^\[enforce fail at [^\]]*\] ")
# The forms in which Python writes an uncaught exception and a syntax error; the frame is rich's.
_TRACEBACK = "Traceback (most recent call last):"
_CALL = re.compile(r'^(?:  File ".+", line \d+(?:, in .+)?|[╭│╰].*)$')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_IGNORED = "Exception ignored in"
_PARTS = re.compile(rf"(?={_IGNORED}|{re.escape(_TRACEBACK)})")
_MOST_LINES, _LONGEST_LINE = 8, 300
_BROKEN_LINK = re.compile(r"connection|broken pipe|socket|timed out|unreachable", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Report(WorkerEnd):
    """The end of a worker, with all that is known of it.

    Attributes:
        raised: The worker's `worker.raised` line, if it wrote one.
        behind_s: Seconds that the clock of its node, which dated that line and `at`, is behind this machine's.
    """

    node: str
    raised: Mapping[str, Any] | None
    behind_s: float


@dataclass(frozen=True)
class Failure:
    """The root cause of a generation's end.

    Attributes:
        failure_class: Class under which the budget counts it; never `peer`.
        error: One line: `ValueError: bad label`, `killed by SIGKILL`, `exit code 3`.
        traceback: The worker's own traceback, or None.
        others: The other ranks' failures folded into one line, or None.
        stderr: The last lines of its standard error if it died without an exception of its own; stacks left out.
        is_final: The worker said that another try would end in the same way.
        exception: The worker's own, as JSON (`system.exceptions`); None if it raised none.
        has_noticed: It ended since another rank was gone, or did not answer, and no rank is known that did so first.
    """

    rank: int
    node: str
    pid: int | None
    exit_code: int
    failure_class: FailureClass
    error: str
    traceback: str | None
    others: str | None
    stderr: tuple[str, ...] = ()
    is_final: bool = False
    exception: Mapping[str, Any] | None = None
    has_noticed: bool = False

    def fingerprint(self, *, knows_steps: bool = True) -> str:
        """Return a text that is equal for the same error again: addresses in its words do not count.

        Numbers count only if *knows_steps* is false: nothing else then tells an error of another step, or file.
        """
        where = f" in {self._place}" if self._has_faulted and self._place else ""
        changing = _NUMBER if knows_steps else _ADDRESS
        return f"{self.failure_class}: {changing.sub('#', self.error + where)}"

    @property
    def is_traced_fault(self) -> bool:
        """True if the worker died of its own doing, at a known place or with known words; a broken link does not count."""
        is_known = self._place is not None or self.error != signal_or_code(self.exit_code)
        has_faulted = self._has_faulted or is_kernel_fault(self.error)
        return has_faulted and is_known and _BROKEN_LINK.search(self.error) is None

    @property
    def suspects_device(self) -> bool:
        """True if the device of its node can be the cause."""
        return self.failure_class == "device" or is_kernel_fault(self.error)

    @property
    def is_unfit_node(self) -> bool:
        """True if its node lacks the devices that the launch trains on."""
        return self.exception is not None and self.exception.get("type") == type_name(DeviceError)

    @property
    def can_come_from_snapshot(self) -> bool:
        """True if the restored state can be the cause."""
        blames = FAILURES[self.failure_class].blames_snapshot
        return blames == "always" or (blames == "if it faulted" and self._has_faulted)

    @property
    def _has_faulted(self) -> bool:
        is_its_own = self.failure_class in {"crash", "user_error"} and not self.has_noticed
        return is_its_own and -self.exit_code in FAULTS

    @property
    def _place(self) -> str | None:
        frames = _FRAME.findall(self.traceback or "")
        return f"{frames[-1][1]} of {frames[-1][0]}" if frames else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `worker.failed` event."""
        return {
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "exit_code": self.exit_code,
            "class": self.failure_class,
            "error": self.error,
            "traceback": self.traceback,
            "exception": self.exception,
            "others": self.others,
            "stderr": list(self.stderr),
        }


def classify(
    exit_code: int,
    raised: Mapping[str, Any] | None = None,
    *,
    oom_killed: bool = False,
    stderr: str = "",
) -> FailureClass:
    """Return the class of one worker's end, looked at alone.

    A worker that ended itself with a code and no `worker.raised` line (an error before `worker.run`, or
    `sys.exit`) is a user error: no signal was involved, so the same code would end the same way.
    """
    if raised is not None:
        named = raised.get("class")
        if named == "crash" and oom_killed:  # a process of the worker's was killed, not the worker
            return "oom"
        return named if named in CLASSES else "user_error"
    if oom_killed:
        return "oom"
    if of_device := class_of_device_error(_said_last(exit_code, stderr)):
        return of_device
    if exit_code > 0 or _is_mismatch(stderr):
        return "user_error"
    if aborted_by_nccl(exit_code, stderr):
        return "hang" if _HANG_ABORT.search(stderr) else "peer"
    return "crash"


def first_failure(reports: Sequence[Report], *, is_finished: bool = False) -> Failure | None:
    """Return the root cause among *reports*, or None when no worker failed by itself.

    A rank that died or raised on its own goes before a rank that only noticed: errors of collectives whose peer is gone
    count as a cause only when there is nothing else. Among the rest the earliest is first.

    Args:
        reports: Reports on all workers of a generation that have ended.
        is_finished: Training had reached its end: workers exit then.
    """
    failed = [r for r in reports if r.exit_code != 0 and not r.ended_by_us]
    if not failed:
        return None
    own = [r for r in failed if not _noticed(r)]
    # The others noticed a rank that exited in good order while they needed it.
    left = [] if is_finished else [r for r in reports if r.exit_code == 0 and not r.ended_by_us]
    first = min(own or left or failed, key=lambda r: (_time(r), r.rank))
    failure_class = classify(first.exit_code, first.raised, oom_killed=first.oom_killed, stderr=first.stderr)
    return Failure(
        rank=first.rank,
        node=first.node,
        pid=first.pid,
        exit_code=first.exit_code,
        failure_class="crash" if failure_class == "peer" else failure_class,
        error=describe(first),
        traceback=_traceback(first),
        others=_fold(first, [r for r in failed if r is not first]),
        stderr=() if first.raised is not None else _last_lines(first),
        is_final=_usage_error(first) is not None
        or (first.raised is not None and first.raised.get("final") is True),
        exception=None if first.raised is None else first.raised.get("exception"),
        has_noticed=_noticed(first),
    )


def describe(report: Report) -> str:
    """Return one line that says how a worker ended; of ranks in different collectives it names the usual cause."""
    ended = _how_it_ended(report)
    return f"{ended.partition(':')[0]}: {_MISMATCH}" if _is_mismatch(ended) else ended


def _how_it_ended(report: Report) -> str:
    """Return its exception, the signal's name, or its exit code."""
    if report.raised is not None and report.raised.get("error"):
        return _one_line(str(report.raised["error"]))
    if report.oom_killed:
        return "killed by the kernel: memory ran out"
    last = None if _is_killed(report) else _last_exception(report.stderr)
    if last is not None:
        return last
    if report.exit_code == 0:
        return "left with exit code 0 in the middle of training"
    ended = signal_or_code(report.exit_code)
    if (usage := _usage_error(report)) is not None:
        return _one_line(usage)
    if report.exit_code > 0:
        return f"{ended}, without an exception"
    words = _terminated(report.stderr)
    return ended if words is None else _one_line(f"{ended}: {words}")


def _noticed(report: Report) -> bool:
    """Return whether the worker only noticed that another rank was gone."""
    if _is_mismatch(_how_it_ended(report)):
        return False
    if report.raised is not None:
        said_class = report.raised.get("class")
        # NCCL's name stands in its errors of memory and devices, too.
        return said_class == "peer" or (
            said_class not in {"device", "oom"} and _PEER.search(describe(report)) is not None
        )
    code = report.exit_code
    if code <= 0:
        return aborted_by_nccl(code, report.stderr)
    # A script of its own: what it raised stands in its standard error alone.
    is_of_device = class_of_device_error(_said_last(code, report.stderr)) is not None
    return not is_of_device and _PEER.search(_last_exception(report.stderr) or "") is not None


def aborted_by_nccl(exit_code: int, stderr: str) -> bool:
    """Return whether a thread of NCCL's aborted the process, since a rank was gone or a collective took too long.

    The same thread aborts a process whose own device failed; that is a cause.
    """
    if exit_code != -signal.SIGABRT or class_of_device_error(_said_last(exit_code, stderr)) is not None:
        return False
    return any(mark.search(stderr) for mark in (_PEER_ABORT, _HANG_ABORT))


def _said_last(exit_code: int, stderr: str) -> str:
    """Return the exception in its standard error that ended a worker, over all of its lines: Python's, or that of C++."""
    if exit_code < 0:
        terminated = _TERMINATE.search(stderr)
        return (
            "" if terminated is None else stderr[terminated.start() :].partition("\nFatal Python error:")[0]
        )
    return _last_traceback(stderr) or ""


def _usage_error(report: Report) -> str | None:
    """Return the usage error of a program that was called with wrong arguments, which no restart cures; else None."""
    if report.exit_code != _USAGE_CODE or report.raised is not None or not _USAGE.search(report.stderr):
        return None
    errors = _USAGE_ERROR.findall(report.stderr)
    return errors[-1] if errors else None


def _time(report: Report) -> float:
    said_at = None if report.raised is None else unix_time(report.raised.get("timestamp"))
    return (report.at if said_at is None else said_at) + report.behind_s


def _traceback(report: Report) -> str | None:
    if report.raised is not None:
        text = report.raised.get("traceback")
        return str(text) if text else None
    return _fatal(report.stderr) if _is_killed(report) else _last_traceback(report.stderr)


def _is_killed(report: Report) -> bool:
    """Return whether a signal ended the worker: an exception in its standard error was logged, and did not end it."""
    return report.exit_code < 0


def _fatal(stderr: str) -> str | None:
    """Return what faulthandler wrote of the thread that crashed, in the form of a traceback: its frames are the other way round."""
    fatal = _FATAL.search(stderr)
    if fatal is None:
        return None
    # Where a thread crashed that is not Python's, as those of gloo are, the main thread's comes last.
    stack = _CURRENT.search(stderr, fatal.end())
    if stack is None:
        *_, stack = (None, *_THREAD.finditer(stderr, fatal.end()))
    if stack is None:
        return None
    frames = reversed(stack[1].splitlines())
    return "\n".join([_TRACEBACK, *filter(None, frames), fatal[0]])


def _is_mismatch(text: str) -> bool:
    return any(mark in text for mark in COLLECTIVE_MISMATCH)


def _terminated(stderr: str) -> str | None:
    """Return the text of the C++ exception that ended the process, or its type; None if none did."""
    terminated = _TERMINATE.search(stderr)
    return None if terminated is None else _ENFORCE.sub("", terminated[2] or terminated[1])


def _last_lines(report: Report) -> tuple[str, ...]:
    """Return the last lines before the stacks, which are reported separately."""
    text = report.stderr
    if (fatal := _FATAL.search(text)) is not None:
        text = text[: fatal.start()]
    if not _is_killed(report) and (traceback := _last_traceback(text)) is not None:
        text = text.partition(_TRACEBACK if _TRACEBACK in text else traceback)[0]
    # A progress bar writes its line anew after each carriage return: the last of them is what a terminal shows.
    lines = [line.rstrip().rpartition("\r")[2][:_LONGEST_LINE] for line in text.split("\n")]
    return tuple(filter(None, lines))[-_MOST_LINES:]


def _last_exception(stderr: str) -> str | None:
    """Return the line of the last exception that Python has shown, or None."""
    shown = _last_shown(stderr)
    return None if shown is None else _one_line(shown.raised)


def _last_traceback(stderr: str) -> str | None:
    """Return the last exception that Python has shown, from the first of its calls to the end, or None."""
    shown = _last_shown(stderr)
    return None if shown is None else shown.text


class _Shown(NamedTuple):
    """An exception as Python shows it.

    Attributes:
        text: From the first of its calls to the end.
        raised: The line that names the exception; its message may have more lines.
    """

    text: str
    raised: str


def _last_shown(stderr: str) -> _Shown | None:
    """Return the last exception that Python has shown; None if there is none.

    Exceptions that Python ignored, as those of destructors, ended nothing. The beginning of a long traceback may be cut off.
    """
    last, is_ignored = None, False
    for part in _PARTS.split(stderr):
        if part.startswith(_IGNORED):
            is_ignored = True
            continue
        lines = list(itertools.dropwhile(lambda line: not _is_call(line), part.splitlines()))
        raised = next(filter(_RAISED.match, itertools.filterfalse(_is_call, lines)), None)
        if raised is not None and not is_ignored:
            last = _Shown("\n".join(lines).rstrip(), raised)
        is_ignored = False
    return last


def _is_call(line: str) -> bool:
    return line.startswith(_TRACEBACK) or _CALL.match(line) is not None


def _fold(first: Report, others: list[Report]) -> str | None:
    said = Counter(_short(first, other) for other in others)
    parts = [f"{n} other rank{'' if n == 1 else 's'}: {text}" for text, n in said.most_common()]
    return "; ".join(parts) or None


def _short(first: Report, other: Report) -> str:
    if describe(other) == describe(first):
        return "the same"
    return "connection closed by peer" if _noticed(other) else describe(other)


def _one_line(text: str) -> str:
    line = " ".join(text.replace("\n  help: ", "; help: ").split())
    return line if len(line) <= _LONGEST_ERROR else line[: _LONGEST_ERROR - 3] + "..."
