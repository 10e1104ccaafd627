"""Shows a person the lines that rank 0 prints: as many as can be read, and the number of lines left out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.launcher.agent.rank_logs import WarningLines
from elasticflow.protocol.messages import PrintedLine
from elasticflow.system.json_lines import FollowedLines
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.run_folder import RunFolder

# Bytes: of a line that is shown, and of one that is waited for to end.
_LONGEST, _MOST_WAITING = 500, 1 << 16
# Lines that wait.
_MOST_LINES = 500
# Lines of each stream at once, and per second in the long run.
_AT_ONCE, _PER_S = 8.0, 0.5
# That lines were left out is told so often.
_COUNT_EVERY_S = 10.0
# A failing worker's last words are told with its failure, so standard error is shown that much later.
_HELD_S = 0.3


class _Waiting(NamedTuple):
    at: float
    text: str


class _Stream:
    """One file, whose lines wait to be shown; of a flood the newest are."""

    def __init__(self, file: FollowedLines, now: float) -> None:
        self.file = file
        self.waiting: deque[_Waiting] = deque()
        self.left_out = 0
        self._may_show, self._filled_at = _AT_ONCE, now

    def add(self, lines: list[bytes], now: float) -> None:
        """Have *lines* wait."""
        # A flood is mostly left out in any case, and the agent has no time to read it.
        self.left_out += sum(not line.isspace() for line in lines[:-_MOST_LINES] if line)
        for line in lines[-_MOST_LINES:]:
            # A progress bar draws over itself: only its last state is shown.
            text = line.rstrip(b"\r").rpartition(b"\r")[2][:_LONGEST].decode("utf-8", "replace")
            if text.strip():
                self.waiting.append(_Waiting(now, printable(text)))
        while len(self.waiting) > _MOST_LINES:
            self.waiting.popleft()
            self.left_out += 1

    def due(self, now: float, until: float) -> list[str]:
        """Return the lines since before *until* that may be shown, and forget them."""
        self._may_show = min(_AT_ONCE, self._may_show + (now - self._filled_at) * _PER_S)
        self._filled_at = now
        lines = []
        while self.waiting and self.waiting[0].at <= until:
            lines.append(self.waiting.popleft().text)
        number = min(len(lines), int(self._may_show))
        self._may_show -= number
        self.left_out += len(lines) - number
        return lines[len(lines) - number :]


class RankPrints:
    """The standard streams of rank 0 in one generation, as they grow, without the warnings, which are events.

    Args:
        begins_at_end: Leave out the lines that the files hold already.
    """

    def __init__(
        self, folder: RunFolder, generation: int, clock: Callable[[], float], *, begins_at_end: bool = False
    ) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        for name in ("stdout", "stderr"):
            path = folder.rank_log(generation, 0, name)
            begin = path.stat().st_size if begins_at_end and path.exists() else 0
            self._streams[name] = _Stream(
                FollowedLines(path, longest=_MOST_WAITING, begins_at=begin), clock()
            )
        self._warnings = WarningLines()
        self._counted_at: float | None = None

    def take(self) -> tuple[list[PrintedLine], int]:
        """Return lines to be shown now, and how many were left out before them and not told yet; the latter now and then."""
        now = self._clock()
        for name, stream in self._streams.items():
            stream.add(self._told_here(name, stream.file.lines()), now)
        is_due = self._counted_at is None or now - self._counted_at >= _COUNT_EVERY_S
        return self._due(now, now - _HELD_S, counts=is_due)

    def end(self, *, has_failed: bool) -> tuple[list[PrintedLine], int]:
        """Return the remaining lines once no worker prints any more; if *has_failed*, without the last ones of stderr."""
        now = self._clock()
        for name, stream in self._streams.items():
            stream.add(self._told_here(name, [*stream.file.lines(), *stream.file.unended()]), now)
            stream.file.close()
        return self._due(now, now - _HELD_S if has_failed else now, counts=True)

    def _told_here(self, name: str, lines: list[bytes]) -> list[bytes]:
        return self._warnings.take(lines)[1] if name == "stderr" else lines

    def _due(self, now: float, until: float, *, counts: bool) -> tuple[list[PrintedLine], int]:
        lines = [
            PrintedLine(name, text)
            for name, stream in self._streams.items()
            for text in stream.due(now, until if name == "stderr" else now)
        ]
        left_out = sum(stream.left_out for stream in self._streams.values()) if counts else 0
        if left_out:
            self._counted_at = now
            for stream in self._streams.values():
                stream.left_out = 0
        return lines, left_out
