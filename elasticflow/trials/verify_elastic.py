"""Checks that a job trains the same at several world sizes and through a kill and a resize."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticflow.errors import TrialRefusedError
from elasticflow.observe.records import read
from elasticflow.trials import compare_runs
from elasticflow.trials import trial as trials
from elasticflow.trials.child import TrialRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.protocol.trajectory_record import Record
    from elasticflow.run_folder import RunFolder
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.compare_runs import RunComparison
    from elasticflow.trials.trial import Trial, World

Compared = Literal["bits", "curve"]
"""Object of a comparison of two trials: the bits after every step, or the loss."""

_GONE_S = 5.0
# Time for torch to ask the driver, which may be in trouble.
_DRIVER_S = 60.0


@dataclass(frozen=True)
class TrialOutcome:
    """Result of one trial.

    Attributes:
        run: Run folder of the trial, which no longer exists if the scratch folder was not kept.
        comparison: Comparison with the reference; None for the reference itself.
        compared: Object of the comparison: the bits after every step, or the loss.
    """

    trial: Trial
    run: RunFolder
    steps: int
    seconds: float
    comparison: RunComparison | None
    compared: Compared


@dataclass
class Verification:
    """Runs trials of a job, and compares each with the first.

    Attributes:
        subject: The job; its own runs and snapshots are left alone.
        worlds: World sizes and degrees that `trial.check` has passed.
        tolerance: Tolerance of `compare_losses`.
        begin: Called with each trial before it starts; returns a function that is called with its steps so far.
        is_kept: False: each run is removed as soon as it is over.
    """

    subject: TriedJob
    worlds: Sequence[World]
    tolerance: float
    scratch: Path
    begin: Callable[[Trial], Callable[[int], None]]
    is_kept: bool
    _mark: str = field(default_factory=partial(secrets.token_hex, 2), init=False)
    _is_exact: bool = field(default=False, init=False)
    _reference: list[Record] = field(default_factory=list, init=False)
    _measured: compare_runs.Evaluated = field(default_factory=dict, init=False)
    # Keys are run folders, which may no longer exist.
    _evaluated: dict[RunFolder, compare_runs.Evaluated] = field(default_factory=dict, init=False)

    def outcomes(self, steps: int) -> Iterator[TrialOutcome]:
        """Yield the result of each trial as soon as it is over: one at each world size, of which the first is the reference.

        Then comes a restarted trial: at the first world size a worker is killed, the launch is drained, and the run
        continues with as many workers. Its bits are compared even if the job is not exact, since lost state shows
        there. If the bits differ and the job is not exact, the reference is repeated: if the repetition has other bits,
        too, the machine cannot repeat the job, and the losses are compared. If there are several world sizes, a
        disturbed trial comes last: it begins at the last world size, a worker is killed, and the run continues at the
        first.

        Args:
            steps: Steps of each trial; fewer if the job is shorter.

        Raises:
            TrialFailedError: the job itself failed in a trial.
            TrialRefusedError: the job is too short, as its trial showed.
        """
        worlds, self._is_exact = self.worlds, bool(self.subject.is_exact)
        for number, world in enumerate(worlds, 1):
            outcome = self.outcome(trials.undisturbed(number, world, steps))
            yield outcome
            if number == 1:
                steps = outcome.steps
                trials.check_length(steps)
        yield self.outcome(trials.restarted(len(worlds) + 1, worlds[0], steps), asks_for_bits=True)
        if worlds[-1] != worlds[0]:
            yield self.outcome(trials.disturbed(len(worlds) + 2, worlds[-1], worlds[0], steps))

    def outcome(self, trial: Trial, *, asks_for_bits: bool = False) -> TrialOutcome:
        """Run *trial* and compare it with the reference; bits are compared for an exact job, or if *asks_for_bits*."""
        began = time.monotonic()
        run, records = self._played(trial)
        last = max(record.step for record in records)
        measured = self._evaluated.pop(run)
        comparison, compared = self._compared(
            records, measured, asks_for_bits=asks_for_bits or self._is_exact
        )
        return TrialOutcome(trial, run, last, time.monotonic() - began, comparison, compared)

    def _compared(
        self, records: list[Record], measured: compare_runs.Evaluated, *, asks_for_bits: bool
    ) -> tuple[RunComparison | None, Compared]:
        if not self._reference:
            self._reference, self._measured = records, measured
            return None, "bits" if self._is_exact else "curve"
        if asks_for_bits:
            comparison = compare_runs.compare_bits(self._reference, records)
            comparison = compare_runs.with_evaluations(comparison, self._measured, measured)
            if self._is_exact or comparison.difference is None or self._can_be_repeated():
                return comparison, "bits"
        return compare_runs.compare_losses(self._reference, records, self.tolerance), "curve"

    def _can_be_repeated(self) -> bool:
        steps = max(record.step for record in self._reference)
        again = trials.undisturbed(trials.count(self.worlds) + 1, self.worlds[0], steps)
        return compare_runs.compare_bits(self._reference, self._played(again)[1]).difference is None

    def _played(self, trial: Trial) -> tuple[RunFolder, list[Record]]:
        played = TrialRun(trial, self.subject, self.scratch, self._mark)
        records = played.play(self.begin(trial))
        if self.subject.is_exact is None:
            self._is_exact = played.is_exact
        self._evaluated[played.run] = compare_runs.evaluated_in(read(played.run.metrics))
        if not self.is_kept:
            # Snapshots of a large model could fill the disk.
            shutil.rmtree(played.run.path, ignore_errors=True)
        return played.run, records


@dataclass
class Scratch:
    """A folder of trials, which is removed afterwards unless it is to be kept."""

    path: Path
    is_kept: bool


@contextmanager
def scratch_folder(keep: Path | None) -> Iterator[Scratch]:
    """Yield *keep*, or a temporary folder (in TMPDIR) that is removed afterwards unless it is marked as kept.

    Raises:
        TrialRefusedError: the folder cannot be made.
    """
    try:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="elasticflow-trials-")) if keep is None else keep.resolve()
    except OSError as error:
        parent = keep or tempfile.gettempdir()
        raise TrialRefusedError(
            f"cannot make a folder for the trials in {parent}: {error.strerror}"
        ) from error
    scratch = Scratch(path, is_kept=keep is not None)
    try:
        yield scratch
    finally:
        deadline = time.monotonic() + _GONE_S
        while not scratch.is_kept and path.exists() and time.monotonic() < deadline:
            shutil.rmtree(path, ignore_errors=True)  # processes that are ending may still write


# Devices of the drivers of CUDA, ROCm and XPU.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")


def count_gpus() -> int:
    """Return the number of accelerators that torch can use; 0 if torch fails, or does not tell within a minute.

    torch is imported, which takes seconds, only if there is a driver.
    """
    if not any(Path(path).exists() for path in _DRIVERS):
        return 0
    code = "import torch; print(); print(torch.accelerator.device_count())"
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DRIVER_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return 0
    # Output of torch or of the user's sitecustomize may come before the number.
    last = answer.stdout.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 0
