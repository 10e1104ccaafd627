"""`elasticflow why` and `cancel`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.cli.look.test_looking import Ran, change, project, ran
from tests.observe.hand_made import RUN_ID, story_of_a_kill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["project", "ran"]  # fixtures

WHY = f"""\
mnist {RUN_ID}  interrupted, 1 failure

rank 1: killed by SIGKILL
  when   2026-11-20 10:00:05, generation 1, after step 47
  class  crash
  where  node n0, process 4711
  others 1 other rank: connection closed by peer
  then   charged, 4 restarts left, 7 steps done again, training again after 0.27 s
  log    runs/mnist/{RUN_ID}/logs/g0001/rank1.stderr
"""

SUPERVISOR = """
import pathlib, signal, sys, time
from elasticflow.system.file_lock import FileLock
lock = FileLock.take(pathlib.Path(sys.argv[1], "lock"))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while len(asked) < int(sys.argv[2]):
    time.sleep(0.01)
"""


def test_why_of_a_killed_worker(ran: Callable[..., Ran], project: Path) -> None:
    """Root cause first, then what it cost."""
    lines = [json.dumps(record) for record in story_of_a_kill() if "event" in record]
    (project / "runs" / "mnist" / RUN_ID / "events.jsonl").write_text("\n".join(lines) + "\n")

    assert (0, WHY, "") == ran("why")


def test_why_of_a_hang_has_the_command_that_reads_the_dumps(ran: Callable[..., Ran], project: Path) -> None:
    """Torch's own, on the folder in which all ranks' dumps lie."""
    folder = project / "runs" / "mnist" / RUN_ID
    dumps = [str(folder / "logs" / "g0001" / "flight_recorder" / f"rank_{rank}") for rank in range(2)]
    hang = {"event": "hang.detected", "generation": 1, "rank": 1, "stacks": "/x", "dumps": dumps}
    records = [record for record in story_of_a_kill() if "event" in record]
    at = next(number for number, record in enumerate(records) if record["event"] == "worker.failed")
    records.insert(at, hang)
    (folder / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    code, told, _ = ran("why")
    assert 0 == code
    assert f"  collectives torchfrtrace runs/mnist/{RUN_ID}/logs/g0001/flight_recorder\n" in told


def test_why_of_a_run_without_a_failure(ran: Callable[..., Ran], project: Path) -> None:
    """Nothing went wrong: said, and an empty list for a program."""
    (project / "runs" / "mnist" / RUN_ID / "events.jsonl").write_text("")

    assert (0, f"mnist {RUN_ID}  interrupted, nothing went wrong\n", "") == ran("why")
    assert (0, "[]\n", "") == ran("why", "--format", "json")


def test_why_of_a_run_that_evaluated_what_it_trained_on(ran: Callable[..., Ran], project: Path) -> None:
    """No failure, but whoever asks afterwards is told."""
    found = {
        "event": "overlap.found",
        "found": 9,
        "looked_up": 10,
        "compared": 50,
        "samples": 50,
        "pair": None,
    }
    (project / "runs" / "mnist" / RUN_ID / "events.jsonl").write_text(json.dumps(found) + "\n")

    said = "overlap 9 of 10 evaluation samples looked up are in the training data"
    assert (0, f"mnist {RUN_ID}  interrupted, nothing went wrong\n  {said}\n", "") == ran("why")
    assert f"  {said.replace('overlap ', 'overlap     ')}\n" in ran("status")[1]
    assert said == f"overlap {json.loads(ran('status', '--format', 'json')[1])['overlap']}"


def test_why_and_status_say_that_samples_vary(ran: Callable[..., Ran], project: Path) -> None:
    """Once for each dataset, however often the run has opened it."""
    varies = {
        "event": "dataset.varies",
        "name": "train",
        "sample": 3,
        "type": "shop.Pictures",
        "parts": [],
        "generators": [],
    }
    (project / "runs" / "mnist" / RUN_ID / "events.jsonl").write_text(f"{json.dumps(varies)}\n" * 2)

    said = "train: sample 3 of shop.Pictures is not the same when it is read twice"
    assert [ran(command)[1].count(said) for command in ("why", "status")] == [1, 1]
    (text,) = json.loads(ran("status", "--format", "json")[1])["data"]
    assert text.startswith(said)


@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        ("interrupted", "it was interrupted", f"continue with: elasticflow resume {RUN_ID}"),
        ("finished", "it finished at 2026-11-20", "`elasticflow runs` lists all runs"),
        ("failed", "it failed at 2026-11-20", "`elasticflow runs` lists all runs"),
    ],
)
def test_cancel_of_a_run_that_is_not_running(
    ran: Callable[..., Ran], project: Path, status: str, said: str, remedy: str
) -> None:
    """Exit code 2, what became of the run, and a remedy."""
    path = project / "runs" / "mnist" / RUN_ID / "state.json"
    path.write_text(json.dumps({"status": status, "updated": "2026-11-20T10:00:00Z"}))
    code, out, err = ran("cancel")

    assert (2, "") == (code, out)
    assert f"run {RUN_ID} is not running: {said}" in err
    assert remedy in err


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(("signals", "options"), [(1, ()), (2, ("--now",))])
def test_cancel_waits_until_the_supervisor_has_left(
    ran: Callable[..., Ran], project: Path, signals: int, options: tuple[str, ...]
) -> None:
    """One signal asks for a drain, two end it now; the command returns once the run's lock is free."""
    folder = project / "runs" / "mnist" / RUN_ID
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(folder), str(signals)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        try:
            supervisor.stdout.readline()
            change(project, status="running", pid=supervisor.pid)
            code, out, err = ran("cancel", RUN_ID, *options)
            left = supervisor.wait(60)
        finally:
            supervisor.kill()

    assert (0, 0) == (code, left)
    assert f"stopping run {RUN_ID} (process {supervisor.pid})\n" == err
    assert f"run {RUN_ID} is interrupted at step 47\n" == out
