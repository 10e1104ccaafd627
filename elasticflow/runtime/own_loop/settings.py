"""The settings of a script's loop: of the job file, under our agent; else the arguments of `elasticflow.join`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.protocol import worker_environment
from elasticflow.protocol.loop_settings import KeptSnapshots, LoopSettings, LoopSnapshots
from elasticflow.runtime.snapshot.snapshots import Keep, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def told(environ: Mapping[str, str]) -> LoopSettings | None:
    """Return what the job file says; None: no agent of ours started this process for a script.

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
    """Return what the script says itself."""
    intervals = (every,) if isinstance(every, str) else tuple(every)
    policy = LoopSnapshots(snapshots, intervals, KeptSnapshots(last=keep), "crc32", ignore=tuple(ignore))
    return LoopSettings(job, "", seed, policy, log_every, threads=threads)


def policy_of(settings: LoopSettings) -> Policy:
    """Return the snapshot policy that *settings* state."""
    given = settings.snapshots
    kept = given.keep
    options: dict[str, Any] = dict(given.options)
    return Policy(
        uri=given.uri,
        every=given.every,
        keep=Keep(last=kept.last, best=kept.best, every=kept.every, within=kept.within),
        integrity="sha256" if given.integrity == "sha256" else "crc32",
        memory=given.memory,
        staging_limit=None if given.staging_limit is None else f"{given.staging_limit} B",
        options=options,
        ignore=given.ignore,
    )
