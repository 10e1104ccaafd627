"""`elasticflow runs`, `status` and `logs` on a hand-made run."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.cli.main import call
from elasticflow.protocol.worker_environment import DeviceUsage
from tests.observe.hand_made import RUN_ID, event, make_run

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
Ran = tuple[int, str, str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one interrupted run; it is the working folder, in Greenwich."""
    (tmp_path / "pyproject.toml").touch()
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    time.tzset()
    return tmp_path


@pytest.fixture
def ran(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs the command line in the project and returns code, output and errors."""

    def run(*arguments: str) -> Ran:
        code = call(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def change(project: Path, **fields: Any) -> None:
    """Write these fields into the run's state.json."""
    path = project / "runs" / "mnist" / RUN_ID / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_runs_is_a_table(ran: Callable[..., Ran]) -> None:
    """One aligned row per run."""
    assert ran("runs") == (
        0,
        (
            "RUN                   JOB    STATUS       STEP   LOSS    EVALUATION       STARTED              TOOK  GOODPUT\n"
            "20261120-100000-4f2a  mnist  interrupted  47/60  0.0426  accuracy 0.9500  2026-11-20 10:00:00  -     -\n"
        ),
        "",
    )


def test_runs_as_json(ran: Callable[..., Ran]) -> None:
    """The same facts for a program; no runs is an empty list."""
    code, out, _ = ran("runs", "--format", "json")
    (facts,) = json.loads(out)
    assert (code, facts["run_id"], facts["status"], facts["step"]) == (0, RUN_ID, "interrupted", 47)
    assert ran("runs", "cifar", "--format", "json") == (0, "[]\n", "")


def test_runs_of_a_job_without_any(ran: Callable[..., Ran], project: Path) -> None:
    """An empty answer says where it looked; it is no error."""
    assert ran("runs", "cifar") == (0, "", f"no runs of cifar in {project}/runs\n")


STATUS = """\
mnist 20261120-100000-4f2a  interrupted
  step        47 of 60 (78 %)
  loss        0.0426
  evaluation  accuracy 0.9500, loss 0.1000 at step 40, best 0.9600
  snapshot    step 40, 000000000040-0002-0a1b2c3d
  launch      launch 1, generation 2, 1 restart
  done again  7 steps
  started     2026-11-20 10:00:00
  ended       2026-11-20 10:00:06
  folder      runs/mnist/20261120-100000-4f2a
continue with: elasticflow resume 20261120-100000-4f2a
"""


@pytest.mark.parametrize("run", [(), ("mnist",), (RUN_ID,), (f"runs/mnist/{RUN_ID}",)])
def test_status_of_an_interrupted_run(ran: Callable[..., Ran], run: tuple[str, ...]) -> None:
    """However the run is named: where it stands, and the command that continues."""
    assert ran("status", *run) == (0, STATUS, "")


def test_the_command_that_continues_a_run_of_another_project_names_its_folder(
    ran: Callable[..., Ran], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id alone would be looked for in the project of the working folder."""
    folder = project / "runs" / "mnist" / RUN_ID
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "pyproject.toml").touch()
    assert ran("status", str(folder))[1].endswith(f"\ncontinue with: elasticflow resume {folder}\n")


def test_status_has_the_command_that_the_launch_was_told(ran: Callable[..., Ran], project: Path) -> None:
    """`resume` would train on the login node what Slurm is to train."""
    change(project, resume_command="elasticflow submit slurm jobs/mnist.toml --run-id slurm-7")
    assert ran("status")[1].endswith(
        "\ncontinue with: elasticflow submit slurm jobs/mnist.toml --run-id slurm-7\n"
    )


def test_status_of_a_failed_run_has_the_root_cause(ran: Callable[..., Ran], project: Path) -> None:
    """What failed first, then why no restart was tried."""
    change(project, status="failed", verdict={"why": "4 failures, restarts.budget is 3"})
    code, out, _ = ran("status")
    assert code == 0
    assert out.endswith(
        "error: rank 1: killed by SIGKILL\n  1 other rank: connection closed by peer\n"
        "  4 failures, restarts.budget is 3\n"
    )


def test_status_of_a_run_that_its_own_code_stopped(ran: Callable[..., Ran], project: Path) -> None:
    """It is finished, short of its length; who stopped it stands right under its steps."""
    change(project, status="finished", verdict={"stopped": "rank 1: good enough"})
    lines = ran("status")[1].splitlines()
    assert lines[0].endswith("finished")
    assert lines[1:3] == ["  step        47 of 60 (78 %)", "  stopped by  rank 1: good enough"]


def test_status_of_a_run_that_is_held_in_memory(ran: Callable[..., Ran], project: Path) -> None:
    """The newest step in memory stands beside the newest snapshot on the store."""
    change(project, status="running", held=47)
    with (project / "runs" / "mnist" / RUN_ID / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = ran("status")[1].splitlines()
    at = lines.index("  snapshot    step 40, 000000000040-0002-0a1b2c3d")
    assert lines[at + 1] == "  in memory   step 47"


def test_status_of_a_run_on_accelerators(ran: Callable[..., Ran], project: Path) -> None:
    """Memory and use of each device while the run is led; a rank that makes others wait."""
    sizes = 12_300_000_000, 16_000_000_000, 15_100_000_000
    devices = [
        {"node": "n0", "rank": 0, "device": "cuda:0", **DeviceUsage(*sizes, 87)._asdict()},
        {"node": "n0", "rank": 1, "device": "cuda:1", **DeviceUsage(*sizes)._asdict()},
    ]
    change(project, status="running", devices=devices)
    run = project / "runs" / "mnist" / RUN_ID
    slow = {
        "rank": 1,
        "node": "n0",
        "device": "cuda:1",
        "factor": 2.4,
        "own_s": 0.12,
        "others_s": 0.05,
        "step_s": 0.2,
    }
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event(5, "rank.slow", **slow)) + "\n")
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = ran("status")[1].splitlines()
        facts = json.loads(ran("status", "--format", "json")[1])
    text = "12.3 GB in tensors, peak 15.1 GB, 16.0 GB reserved"
    at = lines.index(f"  devices     rank 0 (n0, cuda:0): {text}, 87 % busy")
    assert lines[at + 1] == f"              rank 1 (n0, cuda:1): {text}"
    told = "rank 1 (n0, cuda:1) takes 0.12 s of its own for a step, 2.4 times as long as the others: they wait for it"
    assert f"  slow        {told} (generation 1)" in lines
    assert facts["devices"] == devices
    assert facts["slow_ranks"] == [f"{told} (generation 1)"]
    assert f"  slow    {told} (generation 1)" in ran("why")[1].splitlines()
    assert " cuda:0" not in ran("status")[1], "nobody leads it"


def test_status_of_a_run_that_has_just_begun(ran: Callable[..., Ran], project: Path) -> None:
    """Its events tell what it is at, as long as no node does."""
    run = project / "runs" / "mnist" / RUN_ID
    change(project, status="running", activities={})
    (run / "events.jsonl").write_text(json.dumps(event(0, "run.started", 0, launch=1)) + "\n")
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "  now         starting: importing torch, " in ran("status")[1]
    assert "importing" not in ran("status")[1]


def test_status_of_a_run_that_is_at_something_long(ran: Callable[..., Ran], project: Path) -> None:
    """An evaluation that lasts, and what failures may still cost, as the supervisor wrote them down."""
    activities = {
        "n0": {"phase": "step", "subject": "", "step": 47, "since": 1.0},
        "n1": {"phase": "evaluate", "subject": "", "step": 47, "since": time.time() - 7200},
    }
    change(project, status="running", activities=activities, budget_left=3)
    with (project / "runs" / "mnist" / RUN_ID / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        out = ran("status")[1]
        facts = json.loads(ran("status", "--format", "json")[1])
    assert "  now         evaluating: after step 47, 2 h 00 min\n" in out
    assert {"label", "text", "since"} == set(facts["doing"])
    assert "evaluating" == facts["doing"]["label"]
    assert "launch 1, generation 2, 1 restart, 3 left\n" in out
    assert "  now " not in ran("status")[1], "nobody leads it"


def test_a_run_began_with_its_first_launch_and_took_the_time_of_all(
    ran: Callable[..., Ran], project: Path
) -> None:
    """`runs` and `status` say the same: when the run began, not its last launch, and where the time went."""
    run = {"starting": 4.0, "training": 30.0, "evaluating": 10.0, "restarting": 0.0, "ending": 1.0}
    durations = {"launch": {**run, "training": 5.0}, "run": run}
    change(project, launch=2, started="2026-11-20T12:00:00Z", durations=durations)
    assert ran("runs")[1].splitlines()[1].endswith("  2026-11-20 10:00:00  45.0 s  66.6 %")
    told = ran("status")[1]
    assert "  started     2026-11-20 10:00:00\n  launched    2026-11-20 12:00:00\n" in told
    assert "took        45.0 s: starting 4.0 s, training 30.0 s, evaluating 10.0 s, ending 1.0 s\n" in told
    assert "goodput     66.6 % of the time trained steps that count\n" in told
    change(project, durations={"launch": durations["launch"], "run": None})  # nobody knows of the first
    assert "took        20.0 s: " in ran("status")[1]
    assert "ending 1.0 s by the newest launch" in ran("status")[1]


def test_status_as_json(ran: Callable[..., Ran], project: Path) -> None:
    """The keys are frozen: scripts read them."""
    code, out, _ = ran("status", "--format", "json")
    facts = json.loads(out)
    assert code == 0
    assert sorted(facts) == [
        "began_anew",
        "best",
        "best_of",
        "budget_left",
        "compilation",
        "counted_per_s",
        "data",
        "device",
        "devices",
        "doing",
        "durations",
        "epoch",
        "evaluated_step",
        "evaluation",
        "evaluation_raw",
        "failure",
        "folder",
        "generation",
        "goodput",
        "grad_norm",
        "held",
        "held_pauses",
        "job",
        "launch",
        "launch_durations",
        "launched",
        "lingered",
        "loss",
        "lost",
        "mfu",
        "not_held",
        "overlap",
        "pid",
        "restarts",
        "resume_command",
        "run_id",
        "samples_per_s",
        "scalars",
        "script",
        "seconds_left",
        "slow_ranks",
        "snapshot",
        "standbys",
        "started",
        "status",
        "step",
        "steps",
        "steps_done_again",
        "updated",
        "verdict",
        "warnings",
        "weights",
        "workers",
    ]
    assert facts["folder"] == str(project / "runs" / "mnist" / RUN_ID)
    assert facts["started"] == "2026-11-20T10:00:00.000Z"


@pytest.mark.parametrize("command", ["status", "logs"])
def test_an_unknown_run(ran: Callable[..., Ran], project: Path, command: str) -> None:
    """Exit code 2, the place that was searched, and help."""
    assert ran(command, "mnits") == (
        2,
        "",
        f'error: no run "mnits" in {project}/runs\nhelp: did you mean "mnist"?\n',
    )


def test_no_runs_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh project says how to start."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert call(["status"]) == 2
    assert capsys.readouterr().err == (
        f"error: there are no runs in {tmp_path}/runs\nhelp: start one: elasticflow run JOB.toml\n"
    )


def test_logs_of_one_rank(ran: Callable[..., Ran]) -> None:
    """Time, generation and rank, event, fields; tracebacks below; then what was printed."""
    assert ran("logs", "--rank", "1") == (
        0,
        (
            "10:00:00.100 g2 rank1  e0.r1\n"
            "10:00:01.100 g2 rank1  e1.r1\n"
            "10:00:02.100 g2 rank1  e2.r1\n"
            "10:00:09.000 g2 rank1  error: worker.raised\n"
            "    a\n"
            "    b\n"
            "g2 rank1 stdout  printed by 1\n"
            "g2 rank1 stderr  said by 1\n"
        ),
        "",
    )


def test_logs_leave_steps_to_metrics(ran: Callable[..., Ran], project: Path) -> None:
    """And show the last lines alone, if asked to; the job's own lines may be called as ours are."""
    ours, own = (
        {**event(t, "step", 2, rank=1, step=t), "origin": o} for t, o in ((3, "elasticflow"), (4, "net"))
    )
    with (project / "runs/mnist" / RUN_ID / "logs/g0002/rank1.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (ours, own))
    shown = [
        line.split("  ")[1] for line in ran("logs", "--rank", "1")[1].splitlines() if "g2 rank1 " in line
    ]
    assert shown.count("step") == 1
    assert "origin" not in "".join(shown)
    every = ran("logs", "--rank", "1", "--steps")[1]
    assert every.count("step=3") == 1
    tail = ran("logs", "--rank", "1", "--tail", "2")[1].splitlines()
    assert tail == ["g2 rank1 stdout  printed by 1", "g2 rank1 stderr  said by 1"]
    assert ran("logs", "-f", "--rank", "1", "--tail", "2")[1].splitlines() == tail


def test_logs_show_an_exception_as_a_traceback(ran: Callable[..., Ran], project: Path) -> None:
    """Of `logging.exception` in the job's own code."""
    frame = {"path": "train.py", "line": 8, "function": "step", "code": "table[key]", "is_own": True}
    exception = {"type": "KeyError", "message": "'key'", "frames": [frame]}
    log = project / "runs" / "mnist" / RUN_ID / "logs" / "g0002" / "rank0.jsonl"
    log.write_text(json.dumps(event(3, "not there", 2, rank=0, exception=exception)) + "\n")
    out = ran("logs", "--rank", "0")[1]
    assert "rank0  not there\n" in out
    assert "      File \"train.py\", line 8, in step\n        table[key]\n    KeyError: 'key'\n" in out


def test_logs_as_json(ran: Callable[..., Ran]) -> None:
    """Records as they were written; printed lines say where they come from."""
    code, out, _ = ran(
        "logs", "mnist", "--generation", "1", "--rank", "0", "--level", "error", "--format", "json"
    )
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        event(9, "worker.raised", 1, rank=0, level="error", traceback="a\nb"),
        {"generation": 1, "rank": 0, "stream": "stderr", "text": "said by 0"},
    ]


def test_logs_that_are_not_there(ran: Callable[..., Ran]) -> None:
    """Exit code 2, and what there is."""
    assert ran("logs", "--generation", "9") == (
        2,
        "",
        f"error: run {RUN_ID} has no logs of generation 9\nhelp: there are logs of: 1, 2\n",
    )
    assert ran("logs", "--rank", "9") == (
        2,
        "",
        f"error: generation 2 of run {RUN_ID} has no logs of rank 9\nhelp: there are logs of: 0, 1\n",
    )


def test_following_a_run_that_has_ended_ends(ran: Callable[..., Ran]) -> None:
    """`logs -f` of a run that is not running shows what there is and returns."""
    code, out, _ = ran("logs", "-f", "--rank", "0")
    assert code == 0
    assert len(out.splitlines()) == 8


@pytest.mark.usefixtures("real_processes")
def test_looking_at_runs_loads_no_torch(project: Path) -> None:
    """Looking is fast and works where torch is not installed."""
    program = (
        "import sys; from elasticflow.cli.main import call;"
        "codes = [call([c]) for c in ('runs', 'status', 'logs')];"
        "print(codes, [m for m in ('torch', 'fsspec', 'structlog') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stderr == "[0, 0, 0] []\n"
