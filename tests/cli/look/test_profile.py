"""`elasticflow profile`: what it asks for, what it shows of traces, what it refuses."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.cli.look import profile as module
from elasticflow.cli.main import call
from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.jobfile.load import require_job
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import RUN_ID, event, make_run
from tests.observe.test_profile_trace import span

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Ran = tuple[int, str, str]


class Run:
    """A hand-made run in a project, and the command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = RunFolder(folder), capsys

    def profile(self, *arguments: str) -> Ran:
        """Run the command."""
        code = call(["profile", *arguments])
        return code, *self._capsys.readouterr()

    def tell(self, what: str, **fields: Any) -> None:
        """Append an event of a rank."""
        record = event(60.0, f"profile.{what}", profile=1, **fields)
        with self.folder.events.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def trace(self, number: int = 1, rank: int = 0) -> None:
        """Put a trace into the run folder."""
        path = self.folder.trace(number, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.profile_request(number).exists():
            self.folder.profile_request(number).touch()
        events = [
            span("ProfilerStep#1", 0, 1000, "user_annotation"),
            span("elasticflow: forward", 0, 400, "user_annotation"),
            *(span(name, 10 * number, 9) for number, name in enumerate(["aten::mm"] * 3 + ["aten::relu"])),
        ]
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a run that is over."""
    (tmp_path / "pyproject.toml").touch()
    folder = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Run(folder, capsys)


@pytest.fixture
def training(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Yield a run that seems to be running: its lock is held."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    state = json.loads(run.folder.state.read_text())
    state |= {"workers": [{"rank": rank, "pid": 1, "node": "n0"} for rank in range(2)], "status": "running"}
    run.folder.state.write_text(json.dumps(state))
    with locked(run.folder):
        yield run


def test_a_trace_that_is_there(run: Run) -> None:
    """Parts of a step with their shares, operators by what was asked for, and where the file is."""
    run.trace()
    run.tell("finished", rank=0, node="n0", path="x", first_step=7, last_step=7, bytes=1, seconds=0.1)
    code, out, _ = run.profile("--show", "1", "--top", "1", "--sort", "calls")
    lines = [line.split() for line in out.splitlines() if line]
    assert code == 0
    assert "rank 0: 1 step (7 to 7), 1.0 ms each (1.0 ms to 1.0 ms)" == out.splitlines()[0]
    assert [["forward", "400", "us", "40%"], ["other", "600", "us", "60%"]] == lines[2:4]
    assert ["aten::mm", "27", "us", "75%", "27", "us", "3"] == lines[5]
    assert "1 more with --top 0" in out
    assert "open it in https://ui.perfetto.dev" in out

    [found] = json.loads(run.profile("--show", "1", "--format", "json")[1])
    assert (0, 7, {"forward": 400.0, "other": 600.0}) == (
        found["rank"],
        found["first_step"],
        found["parts_us"],
    )


def test_what_cannot_be_had_is_told(run: Run) -> None:
    """A run that is over, a number that nobody asked for; failures of ranks, with exit code 1."""
    code, _, err = run.profile()
    assert (2, "error: run") == (code, err[:10])
    assert "only a run that is training can be traced" in err
    assert f"elasticflow resume {RUN_ID} continues it" in err
    state = json.loads(run.folder.state.read_text())
    run.folder.state.write_text(json.dumps({**state, "status": "finished"}))
    assert "resume" not in run.profile()[2]
    code, _, err = run.profile("--show", "3")
    assert (2, f"error: run {RUN_ID} has no trace 3") == (code, err.splitlines()[0])
    run.trace()
    run.tell("failed", rank=1, reason="its generation ended")
    run.tell("finished", rank=2, node="n1", path="/there/rank2.json.gz")
    code, out, err = run.profile("--show", "1")
    assert (1, "rank 1: its generation ended") == (code, err.splitlines()[0])
    assert "rank 2: its trace lies on node n1: /there/rank2.json.gz" in err
    assert out.startswith("rank 0: 1 step,")
    assert "it has 1" in run.profile("--show", "9")[2]


def test_a_script_without_steps_is_refused_at_once(training: Run) -> None:
    """Nothing would ever answer: the script does not say where its steps begin. A script that may join is asked."""
    root = training.folder.path.parents[2]
    launch = training.folder.launch(training.folder.launch_numbers()[-1])
    launch.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").touch()
    (root / "job.toml").write_text('[job]\nname = "mnist"\n[script]\nentry = "train.py"\n')
    state = json.loads(training.folder.state.read_text())
    training.folder.state.write_text(json.dumps({**state, "script": "train.py", "step": 0}))
    training.folder.metrics.unlink(missing_ok=True)
    (root / "train.py").write_text("import torch\n")
    loaded = require_job(root / "job.toml", ())
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(launch, launch_files(plan, loaded.job, launch, project_root=loaded.project_root), force=True)

    code, _, err = training.profile()
    assert (2, True) == (code, "which has no loop on elasticflow.join" in err)
    assert not training.folder.profiles.exists()
    (root / "train.py").write_text("import elasticflow\n")
    assert 0 == training.profile("--no-wait")[0]


@pytest.mark.parametrize(
    ("ranks", "why"), [("x", "not a list of ranks"), ("0,", "not a list"), ("0,4", "the run has no rank 4")]
)
def test_ranks_are_looked_at_first(training: Run, ranks: str, why: str) -> None:
    """Nothing is asked then."""
    code, _, err = training.profile("--ranks", ranks)
    assert (2, True) == (code, why in err)
    assert not training.folder.profiles.exists()


def test_it_asks_and_waits_for_all_ranks(training: Run) -> None:
    """The request says what was asked for; the next one has the next number."""
    training.folder.trace(3, 0).parent.mkdir(parents=True)

    def answer() -> None:
        deadline = time.monotonic() + 30
        while not training.folder.profile_request(4).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        training.trace(4, 0)
        for rank in range(2):
            record = event(60.0, "profile.finished" if rank == 0 else "profile.failed", profile=4, rank=rank)
            with training.folder.events.open("a") as file:
                file.write(json.dumps({**record, "reason": "no space left"}) + "\n")

    thread = threading.Thread(target=answer)
    thread.start()
    code, out, err = training.profile("--ranks", "all", "--steps", "2", "--shapes")
    thread.join()
    assert (1, True, "rank 1: no space left") == (code, "aten::mm" in out, err.splitlines()[0])
    request = json.loads(training.folder.profile_request(4).read_text())
    assert {"steps": 2, "ranks": [0, 1], "shapes": True, "memory": False, "stacks": False} == request


def test_ranks_that_never_answer_are_not_awaited_when_the_run_is_over(
    training: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace that is there is shown, and the missing one named: the supervisor may have been killed."""
    training.trace(1, 0)
    monkeypatch.setattr(module, "_ask", lambda *_: 1)
    alive = iter([True, True, False])
    monkeypatch.setattr(module, "is_locked", lambda _: next(alive))
    training.tell("finished", rank=0, first_step=2, last_step=2)
    code, out, err = training.profile("--ranks", "all")
    assert (1, True) == (code, "aten::mm" in out)
    assert err == "rank 1: the run ended before the trace was there\n"


def test_a_request_that_the_supervisor_could_not_read(training: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is no rank's, and ends the wait."""
    monkeypatch.setattr(module, "_ask", lambda *_: 1)
    training.tell("failed", rank=None, reason="profiles/1/request.json: no JSON")
    assert (1, "", "profiles/1/request.json: no JSON\n") == training.profile()


def test_a_run_folder_that_takes_no_request(training: Run) -> None:
    """It is another user's, or the disk is full."""
    training.folder.profiles.touch()
    code, out, err = training.profile()
    assert (2, "") == (code, out)
    assert f"error: run {RUN_ID} cannot be asked for a trace: " in err


def test_what_nobody_took_is_withdrawn(training: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended, or the person has pressed Ctrl-C."""
    alive = iter([True, True, False])
    monkeypatch.setattr(module, "is_locked", lambda _: next(alive))
    code, _, err = training.profile()
    assert (2, True) == (code, "ended before the trace was there" in err)
    assert not training.folder.profile_request(1).exists()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "is_locked", lambda _: True)
    monkeypatch.setattr(time, "sleep", interrupted)
    assert 130 == training.profile()[0]
    assert not training.folder.profile_request(2).exists()
    assert 0 == training.profile("--no-wait")[0]
    assert training.folder.profile_request(3).exists()
    assert {"profile": 4} == json.loads(training.profile("--no-wait", "--format", "json")[1])
