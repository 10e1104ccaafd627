"""Running a trial: each launch as a process of its own, held, killed and drained on cue.

The launch goes the way of `elasticflow run`. It is a process of its own so that a kill of the command, or Ctrl-C, takes
everything with it, and because each launch has one process that signals are sent to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import errors, fault_injection
from elasticflow.compiler.inputs.job_json import job_from_json, job_to_json
from elasticflow.errors import ElasticflowError, TrialFailedError
from elasticflow.launcher.launch import Request, launch
from elasticflow.launcher.supervisor.scale_schedule import ALONE, ScaleChange
from elasticflow.observe.history import History
from elasticflow.protocol import trajectory_record, worker_environment
from elasticflow.run_folder import RunFolder
from elasticflow.system.processes import die_with_parent
from elasticflow.trials import fault_actions
from elasticflow.trials.fault_plan import KINDS
from elasticflow.trials.trial import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.fault_actions import DoneFault
    from elasticflow.trials.trial import Trial, TrialAct, TrialLaunch

_POLL_S = 0.02
_MORE_LAUNCHES = 3


@dataclass(frozen=True)
class TriedJob:
    """What is tried.

    Attributes:
        job: The resolved job.
        files: The job file and what it extends.
        project_root: Folder the job's paths are relative to.
    """

    job: Job
    files: tuple[Path, ...]
    project_root: Path


class TrialRun:
    """One trial in its scratch folder.

    Args:
        trial: What is done.
        subject: To what.
        scratch: Where; `runs/<job>/<run id>` and `records/<run id>` are made in it.
        mark: Ends the run's id, so that its processes can be told from those of any other run.

    Attributes:
        run: Its folder.
        done: Faults of its plan that were done so far.
    """

    def __init__(self, trial: Trial, subject: TriedJob, scratch: Path, mark: str) -> None:
        self._trial, self._subject = trial, subject
        self.run = RunFolder.of(scratch, subject.job.job.name, f"{trial.name}-{mark}")
        self._records = scratch / "records" / self.run.run_id
        self._process: subprocess.Popen[bytes] | None = None
        self.done: list[DoneFault] = []

    def play(self, tell: Callable[[int], None]) -> list[trajectory_record.Record]:
        """Return the records of the whole trial; nothing that it started lives afterwards.

        Args:
            tell: Called now and then with the steps finished.

        Raises:
            TrialFailedError: a launch ended otherwise than it should.
        """
        self._records.mkdir(parents=True)
        self.run.agent_log().parent.mkdir(parents=True)
        try:
            for each in self._trial.launches:
                self._launch(each, tell)
            for _ in range(
                _MORE_LAUNCHES
            ):  # a fault that was found only while it left: the same command goes on
                if self._trial.plan is None or self._last_step() >= self._trial.steps:
                    break
                last = self._trial.launches[-1]
                self._launch(replace(last, acts=last.acts[-1:]), tell)
        finally:
            self._kill()
        return trajectory_record.read_records(self._records)

    def _last_step(self) -> int:
        return max((record.step for record in trajectory_record.read_records(self._records)), default=0)

    def _launch(self, what: TrialLaunch, tell: Callable[[int], None]) -> None:
        for act in what.acts:
            trajectory_record.held_file(self._records, act.step).unlink(missing_ok=True)
            trajectory_record.hold_file(self._records, act.step).touch()
        self._start(what)
        for act in what.acts:
            if self._await(trajectory_record.held_file(self._records, act.step).exists, tell):
                self._do(act)
        assert self._process is not None
        self._await(bool, tell)
        if self._process.returncode not in (errors.FINISHED, errors.INTERRUPTED):
            raise self._failure(what)

    def _start(self, what: TrialLaunch) -> None:
        subject = self._subject
        config: dict[str, Any] = {
            "job": job_to_json(job_of(self._trial, what, subject.job)),
            "files": [str(path.absolute()) for path in subject.files],
            "project_root": str(subject.project_root),
            "run_folder": str(self.run.path),
            "scale": [],
        }
        marks = {**os.environ, worker_environment.TRAJECTORY: str(self._records)}
        if self._trial.plan is not None:
            marks[fault_injection.VARIABLE] = fault_actions.fault_variable(self._trial.plan, self._records)
            changes = fault_actions.scale(self._trial.plan, self._records)
            config["scale"] = [[each.nodes, each.by_force, each.cue and str(each.cue)] for each in changes]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elasticflow.trials.child", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=marks,
                start_new_session=True,  # Ctrl-C in a terminal reaches the command only
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(config).encode())

    @property
    def _log(self) -> Path:
        return self.run.path / "logs" / "launch.log"

    def _await(self, is_so: Callable[[], bool], tell: Callable[[int], None]) -> bool:
        """Return whether it came to be so before the launch ended."""
        assert self._process is not None
        while self._process.poll() is None:
            if is_so():
                return True
            tell(int(self._state().get("step", 0)))
            time.sleep(_POLL_S)
        return False

    def _do(self, act: TrialAct) -> None:
        assert self._process is not None
        if act.what == "drain":
            self._process.send_signal(signal.SIGTERM)  # it is held until its workers have been told
            return
        if not self._await(lambda: bool(self._state().get("workers")), lambda _: None):
            return
        if act.what == "faults":
            self._do_faults(act.step)
        else:
            victim = max(self._state()["workers"], key=lambda worker: int(worker["rank"]))
            os.kill(victim["pid"], signal.SIGKILL)

    def _do_faults(self, step: int) -> None:
        assert self._process is not None
        assert self._trial.plan is not None
        workers = self._state()["workers"]
        hand = fault_actions.FaultActor(self.run, self._process.pid, workers, self._records)
        done = hand.do_all(self._trial.plan, step)
        self.done += done
        if not any(
            KINDS[each.fault.what].nodes for each in done
        ):  # else a drain, or the node's end, lets it go on
            trajectory_record.held_file(self._records, step).unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.run.state.read_text(encoding="utf-8"))
            return found
        return {}

    def _failure(self, what: TrialLaunch) -> TrialFailedError:
        assert self._process is not None
        verdict = self._state().get("verdict") or {}
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()
        why = verdict.get("error") or said or f"it ended with code {self._process.returncode}"
        failures = History.read(self.run).failures
        traceback = failures[-1].traceback if failures else None
        count = f"{what.world_size} worker{'' if what.world_size == 1 else 's'}"
        return TrialFailedError(f"the job failed with {count}: {why}", traceback=traceback or "")

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # all below it dies with it
            self._process.wait()


def main() -> None:
    """Make one launch of a trial: `python -m elasticflow.trials.child PARENT_PID`, the rest on stdin."""
    die_with_parent(int(sys.argv[1]))
    config = json.load(sys.stdin)
    files: Sequence[str] = config["files"]
    request = Request(
        job=job_from_json(config["job"]),
        files=tuple(map(Path, files)),
        overrides=(),
        project_root=Path(config["project_root"]),
        folder=RunFolder(Path(config["run_folder"])),
        scale=tuple(
            ScaleChange(0.0, nodes, by_force, cue and Path(cue)) for nodes, by_force, cue in config["scale"]
        )
        or ALONE,
    )
    try:
        code = launch(request, lambda _: None, lambda sentence: _say(f"warning: {sentence}"))
    except ElasticflowError as error:
        _say(f"error: {error}")
        code = error.exit_code
    os._exit(code)  # see `cli/main.py`


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
