"""Whether a job trains the same at several world sizes and through a kill and a resize (floor 3)."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.errors import TrialRefusedError
from elasticflow.launcher.trials import prove, trials
from elasticflow.launcher.trials.trial_process import TrialRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.launcher.trials.prove import Comparison
    from elasticflow.launcher.trials.trial_process import Subject
    from elasticflow.launcher.trials.trials import Trial
    from elasticflow.run_folder import RunFolder
    from elasticflow.trajectory import Record

_GONE_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """One trial and what came of it.

    Attributes:
        trial: What was done.
        run: Its run folder; gone if it lay in a scratch folder that was not kept.
        steps: Steps finished.
        seconds: It took.
        comparison: With the reference; None: it is the reference.
    """

    trial: Trial
    run: RunFolder
    steps: int
    seconds: float
    comparison: Comparison | None


def verify(
    subject: Subject,
    worlds: Sequence[int],
    steps: int,
    tolerance: float,
    scratch: Path,
    begin: Callable[[Trial], Callable[[int], None]],
    *,
    is_kept: bool = True,
) -> Iterator[Outcome]:
    """Yield what came of each trial as soon as it is over: one at each of *worlds*, the first being the reference.

    Then a disturbed one: it begins at the last world size, a worker is killed, and it goes on at the first.

    Args:
        subject: The job; its own runs and snapshots are left alone.
        worlds: World sizes that `trials.check` has passed.
        steps: Steps of each trial, or less where the job is shorter.
        tolerance: Of `prove.curves`.
        scratch: Where the trials live.
        begin: Called with each trial before it starts; returns what is called with its steps so far.
        is_kept: Leave the runs there; False: each goes as soon as it is over.

    Raises:
        TrialFailedError: the job itself failed in a trial.
        TrialRefusedError: the job turned out to be too short.
    """
    mark = secrets.token_hex(2)
    reference: list[Record] = []

    def outcome(trial: Trial) -> Outcome:
        began = time.monotonic()
        played = TrialRun(trial, subject, scratch, mark)
        records = played.play(begin(trial))
        if not is_kept:
            shutil.rmtree(played.run.path, ignore_errors=True)  # snapshots of a large model fill a disk
        comparison = None
        if not reference:
            reference.extend(records)
        elif subject.job.train.consistency == "exact":
            comparison = prove.bits(reference, records)
        else:
            comparison = prove.curves(reference, records, tolerance)
        last = max(record.step for record in records)
        return Outcome(trial, played.run, last, time.monotonic() - began, comparison)

    for number, world_size in enumerate(worlds, 1):
        found = outcome(trials.undisturbed(number, world_size, steps))
        yield found
        if number == 1:
            steps = found.steps
            trials.check_length(steps)
    yield outcome(trials.disturbed(len(worlds) + 1, worlds[-1], worlds[0], steps))


@dataclass
class Scratch:
    """A folder of trials; gone afterwards unless it is to be kept."""

    path: Path
    is_kept: bool


@contextmanager
def scratch_folder(keep: Path | None) -> Iterator[Scratch]:
    """Yield *keep*, or else a temporary folder (TMPDIR says where) that is gone afterwards unless it is marked as kept.

    Raises:
        TrialRefusedError: it cannot be made.
    """
    try:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="elasticflow-trials-")) if keep is None else keep.resolve()
    except OSError as error:
        place = keep or tempfile.gettempdir()
        raise TrialRefusedError(
            f"cannot make a folder for the trials in {place}: {error.strerror}"
        ) from error
    scratch = Scratch(path, is_kept=keep is not None)
    try:
        yield scratch
    finally:
        deadline = time.monotonic() + _GONE_S
        while not scratch.is_kept and path.exists() and time.monotonic() < deadline:
            shutil.rmtree(path, ignore_errors=True)  # who is dying may still write


def count_gpus() -> int:
    """Return how many GPUs torch can use here; without a driver it need not be asked, which takes seconds."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(found.stdout) if found.returncode == 0 else 0
