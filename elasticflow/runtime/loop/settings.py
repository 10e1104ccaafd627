"""The settings of a script's loop: from the job file under our agent, otherwise from the arguments of `elasticflow.join`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.protocol.loop_settings import LoopSettings
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def told(environ: Mapping[str, str]) -> LoopSettings | None:
    """Return the settings of the job file; None if no agent of ours started this process for a script.

    Raises:
        ValueError: another version of elasticflow wrote it.
    """
    text = environ.get(worker_environment.LOOP)
    return None if text is None else LoopSettings.from_json(text)


def of_arguments(
    job: str,
    seed: int,
    snapshots: str | None,
    every: str | Sequence[str],
    keep: int,
    ignore: Sequence[str],
    log_every: int,
    threads: int | None,
) -> LoopSettings:
    """Return the settings that the script passes to `elasticflow.join`."""
    intervals = (every,) if isinstance(every, str) else tuple(every)
    policy = SnapshotSettings(snapshots, intervals, keep=Keep(last=keep), ignore=tuple(ignore))
    return LoopSettings(job, "", seed, policy, log_every, threads=threads)
