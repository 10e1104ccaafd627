"""Makes `kill.svg`, README's first picture: the main job in a terminal, while two of its processes are killed.

`python tests/guide/kill_transcript.py [-o FILE]`, in a checkout with elasticflow and torch. The run is a real one, in a copy of the
project and in a pseudo-terminal; a worker, then the agent (with which all workers die) get SIGKILL by their pids as soon as
the run has done so many steps. What the terminal shows at the end is drawn as it is, but for the lines about the data. A
second run, which nobody disturbs, must end with the same bits; else there is no picture.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "elasticflow" / "guide" / "pictures" / "kill.svg"
COMMAND = ("run", "jobs/mnist.toml")
COLUMNS, ROWS = 100, 40
LEFT_OUT = re.compile(r"· data  |^ {20,}(/|b?[0-9a-f]{8}$)|^ +runs/")
"""Lines that name places of this machine."""


class Kill(NamedTuple):
    """A process to be killed: as soon as *step* is in the run's metrics."""

    step: int
    whom: str


KILLS = (Kill(50, "rank 1"), Kill(145, "the agent"))


class Cell(NamedTuple):
    """A character on the screen, and what it is painted with: SGR codes."""

    character: str
    paint: frozenset[int]


BLANK = Cell(" ", frozenset())


class Screen:
    """The lines that a terminal has shown, as far as programs that redraw their last lines need one."""

    def __init__(self) -> None:
        self.lines: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._paint: frozenset[int] = frozenset()

    def feed(self, text: str) -> None:
        """Take what a program has written."""
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\s\S]", text):
            if part.startswith("\x1b["):
                self._control(part[2:-1], part[-1])
            elif part == "\r":
                self._column = 0
            elif part == "\n":
                self._row += 1
                while len(self.lines) <= self._row:
                    self.lines.append([])
            else:
                self._put(part)

    def _put(self, character: str) -> None:
        line = self.lines[self._row]
        line.extend([BLANK] * (self._column + 1 - len(line)))
        line[self._column] = Cell(character, self._paint)
        self._column += 1

    def _control(self, numbers: str, letter: str) -> None:
        first = int(numbers) if numbers.isdecimal() else 0
        if letter == "m":
            for code in (int(number or 0) for number in numbers.split(";")):
                self._paint = self._paint | {code} if code else frozenset()
        elif letter == "K":
            self.lines[self._row][0 if first == 2 else self._column :] = []
        elif letter == "J":
            self.lines[self._row][self._column :] = []
            del self.lines[self._row + 1 :]
        elif letter == "A":
            self._row = max(0, self._row - (first or 1))
        elif letter == "B":
            self._row = min(len(self.lines) - 1, self._row + (first or 1))
        elif letter not in "hl":
            raise ValueError(f"a terminal's code that this script does not know: {numbers}{letter}")


def main() -> int:
    """Make the picture; exit code 1 if the two runs end with different weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "-o", "--output", type=Path, default=PICTURE, help="default: the picture that README shows"
    )
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for name in ("jobs", "examples"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        (project / "pyproject.toml").touch()
        screen, pids = disturbed_run(project)
        calm = [*elasticflow(), *COMMAND, "--run-id", "calm"]
        subprocess.run(calm, cwd=project, env=environment(), check=True, stdout=subprocess.DEVNULL)
        if last_weights(project, "calm") != last_weights(project, None):
            sys.stderr.write("the weights differ from those of a run that nobody disturbed\n")
            return 1
    output.write_text(svg(lines_of(screen, pids)), encoding="utf-8")
    sys.stdout.write(f"{output} made: look at it\n")
    return 0


def elasticflow() -> list[str]:
    """Return how this environment's elasticflow is called."""
    return [sys.executable, "-m", "elasticflow"]


def environment() -> dict[str, str]:
    """Return the environment of a plain terminal in UTF-8."""
    mine = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | mine


def disturbed_run(project: Path) -> tuple[Screen, list[int]]:
    """Run the job in a pseudo-terminal, killing as `KILLS` says; return its screen and the killed pids."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.execve(sys.executable, [*elasticflow(), *COMMAND], environment())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written, killed = b"", list[int]()
    while True:
        if select.select([terminal], [], [], 0.005)[0]:
            try:
                some = os.read(terminal, 65536)
            except OSError:
                break
            if not some:
                break
            written += some
        if len(killed) < len(KILLS) and steps_done(project) >= KILLS[len(killed)].step:
            killed.append(victim(project, pid, KILLS[len(killed)].whom))
            os.kill(killed[-1], signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    screen = Screen()
    screen.feed(written.decode())
    if code != 0 or len(killed) != len(KILLS):
        text = "\n".join("".join(cell.character for cell in line) for line in screen.lines)
        raise SystemExit(f"the run ended with code {code} after {len(killed)} kills:\n{text}")
    return screen, killed


def run_folder(project: Path, run_id: str | None) -> Path | None:
    """Return the folder of a run; of the only one that has no id given by hand, if *run_id* is None."""
    for folder in (project / "runs" / "mnist").glob("*/"):
        if folder.name == run_id or (run_id is None and folder.name[0].isdigit()):
            return folder
    return None


def steps_done(project: Path) -> int:
    """Return the newest step in the run's metrics."""
    folder = run_folder(project, None)
    path = folder / "metrics.jsonl" if folder else None
    if path is None or not path.exists():
        return 0
    steps = re.findall(r'"step": (\d+)', path.read_text())
    return int(steps[-1]) if steps else 0


def victim(project: Path, supervisor: int, whom: str) -> int:
    """Return the pid of a rank, or of the agent: the supervisor's child whose descendants the workers are."""
    folder = run_folder(project, None)
    assert folder is not None
    workers = json.loads((folder / "state.json").read_text())["workers"]
    pids = {f"rank {worker['rank']}": int(worker["pid"]) for worker in workers}
    if whom in pids:
        return pids[whom]
    above = [process.pid for process in psutil.Process(pids["rank 0"]).parents()]
    return above[above.index(supervisor) - 1]


def last_weights(project: Path, run_id: str | None) -> tuple[dict[str, object], bytes]:
    """Return what weights a run has ended with, and their bytes, as `elasticflow snapshots export` writes them."""
    folder = run_folder(project, run_id)
    assert folder is not None
    path = project / f"{folder.name}.safetensors"
    export = ["snapshots", "export", str(folder), "latest", "--format", "safetensors", "-o", str(path)]
    subprocess.run(
        [*elasticflow(), *export], cwd=project, env=environment(), check=True, stdout=subprocess.DEVNULL
    )
    content = path.read_bytes()
    # The file's format: the length of a header, the header, the tensors. Its metadata name the run.
    end = 8 + int.from_bytes(content[:8], "little")
    return {**json.loads(content[8:end]), "__metadata__": None}, content[end:]


def lines_of(screen: Screen, pids: list[int]) -> list[list[Cell]]:
    """Return the lines of the picture: the command, what the terminal showed, and each kill where its answer begins."""
    lines = [[Cell(sign, frozenset({1})) for sign in f"$ elasticflow {' '.join(COMMAND)}"]]
    kills = list(zip(KILLS, pids, strict=True))
    for line in screen.lines:
        text = "".join(cell.character for cell in line)
        if not text.strip() or LEFT_OUT.search(text):
            continue
        if "✗" in text and kills:
            kill, pid = kills.pop(0)
            note = f"{'':10}{f'$ kill -9 {pid}':17}# {kill.whom}, from another terminal"
            lines.append([Cell(sign, frozenset({35})) for sign in note])
        lines.append(line)
    return lines


STYLE = """\
    .back { fill: #ffffff; stroke: #d0d7de } .plain { fill: #1f2328 } .dim { fill: #59636e } .bold { font-weight: 600 }
    .c31 { fill: #cf222e } .c32 { fill: #116329 } .c33 { fill: #7d4e00 } .c35 { fill: #8250df } .c36 { fill: #1b6b77 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; stroke: #30363d } .plain { fill: #e6edf3 } .dim { fill: #9198a1 }
      .c31 { fill: #ff7b72 } .c32 { fill: #56d364 } .c33 { fill: #e3b341 } .c35 { fill: #d2a8ff } .c36 { fill: #56d4dd }
    }"""
_WIDTH, _HEIGHT, _MARGIN = 8.0, 19, 16
"""Of a character, of a line, around all, in pixels."""


def svg(lines: list[list[Cell]]) -> str:
    """Return the picture: letters of any fixed-width font, each at its place, in the colours of light or dark pages."""
    width = _MARGIN * 2 + _WIDTH * max(map(len, lines))
    height = _MARGIN * 2 + _HEIGHT * len(lines)
    text = html.escape("\n".join("".join(cell.character for cell in line).rstrip() for line in lines))
    drawn = [
        f"  <g>{''.join(_spans(line, _MARGIN + _HEIGHT * (number + 0.75)))}</g>"
        for number, line in enumerate(lines)
    ]
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img"
     aria-labelledby="title text" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
     font-size="13">
  <title id="title">elasticflow run jobs/mnist.toml: a worker and the agent are killed, the run continues and finishes</title>
  <desc id="text">{text}</desc>
  <!-- made by tests/guide/kill_transcript.py -->
  <style>
{STYLE}
  </style>
  <rect class="back" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>
{chr(10).join(drawn)}
</svg>
"""


def _spans(line: list[Cell], y: float) -> list[str]:
    """Return the words of a line as texts of their own, so that no font moves what comes after them."""
    found = []
    words = re.finditer(r"\S+( \S+)*", "".join(cell.character for cell in line))
    for word in words:
        begin = word.start()
        while begin < word.end():
            end = begin
            while end < word.end() and line[end].paint == line[begin].paint:
                end += 1
            text = "".join(cell.character for cell in line[begin:end])
            if text.strip():
                begin += len(text) - len(text.lstrip())
                text = text.strip()
                found.append(
                    f'<text x="{_MARGIN + _WIDTH * begin:g}" y="{y:g}" textLength="{_WIDTH * len(text):g}"'
                    f' lengthAdjust="spacingAndGlyphs" class="{_class(line[begin].paint)}">{html.escape(text)}</text>'
                )
            begin = end
    return found


def _class(paint: frozenset[int]) -> str:
    colours = [f"c{code}" for code in sorted(paint) if 31 <= code <= 37]
    base = colours[0] if colours else "dim" if 2 in paint else "plain"
    return f"{base} bold" if 1 in paint else base


if __name__ == "__main__":
    sys.exit(main())
