"""Tries of the recovery benchmark with Ray Train, as its documentation says; the script is `recovery_ray_script.py`."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

from tests.measured.benchmarks.recovery_torchrun import Job, Rival

SCRIPT = Path(__file__).with_name("recovery_ray_script.py")


def is_installed() -> bool:
    """Return whether Ray can be tried here: `pip install 'ray[train]'`."""
    return util.find_spec("ray") is not None


class RayTrain(Rival):
    """Tries with Ray Train, each in a cluster of this machine alone."""

    def job(self) -> Job:
        """Return a job, not yet started."""
        return RayJob(self._folder, self._model)


class RayJob(Job):
    """One job of Ray's, its cluster included."""

    def command(self, options: tuple[str, ...]) -> list[str]:
        """Return what starts Ray with the script; torchrun's options say nothing to it."""
        return [sys.executable, str(SCRIPT)]
