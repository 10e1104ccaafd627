"""Runs a trial: each launch is a separate process, which is held, killed and drained on cue.

A launch does the same as `elasticflow run`. It is a separate process so that a kill of the command, or Ctrl-C, ends
everything, and so that signals go to one process per launch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow import errors, events
from elasticflow.errors import TrialFailedError
from elasticflow.launcher.supervisor.launch_record import Request
from elasticflow.launcher.supervisor.scale_schedule import ALONE
from elasticflow.observe.history import RunHistory, state_of
from elasticflow.protocol import trajectory_record, worker_environment
from elasticflow.run_folder import RunFolder
from elasticflow.system import fault_injection
from elasticflow.system.installation import module_command
from elasticflow.system.records import text_of
from elasticflow.trials import faults
from elasticflow.trials.trial import job_of, nothing_to_try

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.faults import DoneFault
    from elasticflow.trials.trial import Trial, TrialAct, TrialLaunch

_POLL_S = 0.02
_MORE_LAUNCHES = 3


@dataclass(frozen=True)
class TriedJob:
    """The job that trials run."""

    job: Job
    files: tuple[Path, ...]
    project_root: Path

    @property
    def is_exact(self) -> bool | None:
        """True if its steps have the same bits at every world size; None for a script: `TrialRun.is_exact` tells."""
        return None if self.job.script is not None else self.job.train.consistency == "exact"


class TrialRun:
    """One trial in its scratch folder.

    Args:
        scratch: Folder in which `runs/<job>/<run id>` and `records/<run id>` are made.
        mark: End of the run's id, by which its processes can be told from those of any other run.

    Attributes:
        done: Faults of its plan that were done up to now.
    """

    def __init__(self, trial: Trial, subject: TriedJob, scratch: Path, mark: str) -> None:
        self._trial, self._subject = trial, subject
        self.run = RunFolder.of(scratch, subject.job.job.name, f"{trial.name}-{mark}")
        self._records = scratch / "records" / self.run.run_id
        self._process: subprocess.Popen[bytes] | None = None
        self.done: list[DoneFault] = []

    def play(self, tell: Callable[[int], None]) -> list[trajectory_record.Record]:
        """Run the trial and return all its records; no process that it started lives afterwards.

        Args:
            tell: Called now and then with the number of finished steps.

        Raises:
            TrialFailedError: a launch failed.
            TrialRefusedError: the job's script reports no steps.
        """
        self._records.mkdir(parents=True)
        self.run.agent_log().parent.mkdir(parents=True)
        try:
            for trial_launch in self._trial.launches:
                self._launch(trial_launch, tell)
            if self._trial.plan is not None:
                self._go_on(tell)
        finally:
            self._kill()
        records = trajectory_record.read_records(self._records)
        if not records and self._subject.job.script is not None:
            script = self._subject.job.script
            raise nothing_to_try(script.entry or script.module or "")
        return records

    @property
    def is_exact(self) -> bool:
        """True if the steps that were played have the same bits at every world size."""
        return trajectory_record.exact_file(self._records).exists()

    def _go_on(self, tell: Callable[[int], None]) -> None:
        """Launch again if a fault ended the run too early: it may be found only while the last launch exits."""
        last = self._trial.launches[-1]
        for _ in range(_MORE_LAUNCHES):
            records = trajectory_record.read_records(self._records)
            if max((record.step for record in records), default=0) >= self._trial.steps:
                return
            self._launch(replace(last, acts=last.acts[-1:]), tell)

    def _launch(self, trial_launch: TrialLaunch, tell: Callable[[int], None]) -> None:
        for act in trial_launch.acts:
            trajectory_record.held_file(self._records, act.step).unlink(missing_ok=True)
            trajectory_record.hold_file(self._records, act.step).touch()
        self._start(trial_launch)
        for act in trial_launch.acts:
            if self._await(trajectory_record.held_file(self._records, act.step).exists, tell):
                self._do(act)
        assert self._process is not None
        self._await(bool, tell)
        if self._process.returncode not in (errors.FINISHED, errors.INTERRUPTED):
            raise self._failure(trial_launch)

    def _start(self, trial_launch: TrialLaunch) -> None:
        subject, plan = self._subject, self._trial.plan
        request = Request(
            job=job_of(self._trial, trial_launch, subject.job),
            files=tuple(path.absolute() for path in subject.files),
            overrides=(),
            project_root=subject.project_root,
            folder=self.run,
            scale=ALONE if plan is None else faults.scale(plan, self._records),
        )
        variables = {**os.environ, worker_environment.TRAJECTORY: str(self._records)}
        if plan is not None:
            variables[fault_injection.VARIABLE] = faults.fault_variable(plan, self._records)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                module_command("elasticflow.trials.launch_process", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,  # Ctrl-C in a terminal reaches the command only
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(pickle.dumps(request))

    @property
    def _log(self) -> Path:
        return self.run.path / "logs" / "launch.log"

    def _await(self, is_so: Callable[[], bool], tell: Callable[[int], None]) -> bool:
        """Wait until *is_so* is true or the launch has ended; return True if *is_so* came first."""
        assert self._process is not None
        while self._process.poll() is None:
            if is_so():
                return True
            tell(state_of(self.run).step)
            time.sleep(_POLL_S)
        return False

    def _do(self, act: TrialAct) -> None:
        assert self._process is not None
        if act.what == "drain":
            self._process.send_signal(signal.SIGTERM)  # the run is held until its workers have been told
            return
        if not self._await(lambda: bool(state_of(self.run).workers), lambda _: None):
            return
        if act.what == "faults":
            self._do_faults(act.step)
        else:
            last = max(state_of(self.run).workers, key=lambda worker: worker.rank)
            if last.process is not None:
                last.process.send(signal.SIGKILL)

    def _do_faults(self, step: int) -> None:
        assert self._process is not None
        assert self._trial.plan is not None
        workers = state_of(self.run).workers
        actor = faults.FaultActor(self.run, self._process.pid, workers, self._records)
        done = actor.do_all(self._trial.plan, step)
        self.done += done
        # If a fault changes the number of nodes, a drain or the node's end lets the run continue.
        if not any(faults.KINDS[done_fault.fault.what].nodes for done_fault in done):
            trajectory_record.held_file(self._records, step).unlink(missing_ok=True)

    def _failure(self, trial_launch: TrialLaunch) -> TrialFailedError:
        assert self._process is not None
        verdict = state_of(self.run).verdict or {}
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()
        why = verdict.get("error") or said or f"it ended with code {self._process.returncode}"
        traceback = text_of(RunHistory.read(self.run).last.get(events.WORKER_FAILED, {}), "traceback")
        count = f"{trial_launch.world.workers} worker{'' if trial_launch.world.workers == 1 else 's'}"
        return TrialFailedError(f"the job failed with {count}: {why}", traceback=traceback or "")

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # its child processes die with it
            self._process.wait()
