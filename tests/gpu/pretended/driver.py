"""A CUDA driver's memory of which process opened it: for torch's CUDA build (`sitecustomize.py`) and its CPU build."""

from __future__ import annotations

import os


class Driver:
    """The pretended driver of this process, and of those forked from it.

    PRETENDED_GPUS and CUDA_VISIBLE_DEVICES say how many devices there are: 1 if both are unset.

    Attributes:
        calls: Names of the calls that opened the driver, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        # Process whose forks cannot use CUDA; None: CUDA was not touched.
        self._opened_by: int | None = None

    def count(self) -> int:
        """Count the devices, as `cudaGetDeviceCount`, which opens the driver: torch marks later forks."""
        self._open("_cuda_getDeviceCount")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = int(os.environ.get("PRETENDED_GPUS", "1"))
        return there if visible is None else min(there, len([part for part in visible.split(",") if part]))

    def init(self) -> None:
        """Open the driver, as `cuInit`.

        Raises:
            RuntimeError: a parent of this process has opened it.
        """
        if self.is_in_bad_fork():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self._open("_lazy_init")

    def is_in_bad_fork(self) -> bool:
        """Return whether a parent of this process has opened the driver: torch keeps that by `pthread_atfork`."""
        return self._opened_by not in {None, os.getpid()}

    def _open(self, name: str) -> None:
        self.calls.append(name)
        self._opened_by = self._opened_by or os.getpid()
