"""The arguments of a script's loop, recorded in its snapshots and compared where a run is resumed.

The settings bear the names that job files give them, and the same table says how much a difference matters
(`protocol/key_weights.py`): a corrupting change is refused, a change of the trajectory needs consent, and a harmless change is
reported.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.errors import LoopDriftError, StateError
from elasticflow.protocol import worker_environment
from elasticflow.protocol.key_weights import BITS, EXACT_WEIGHTS, weigh
from elasticflow.runtime.process import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.loop.gradients import Gradients
    from elasticflow.runtime.process.context import Worker

_ARGUMENTS = {
    "job.seed": "seed",
    "train.consistency": "virtual_shards",
    "train.virtual_shards": "virtual_shards",
    "train.precision": "precision",
    "parallel.offload": "offload",
    "dataset.global_batch_size": "size",
    "dataset.tail": "tail",
    "dataset.shards": "shards",
    "train.epochs": "epochs",
    "train.steps": "steps",
}
_SOURCES = "sources."
_DIGEST_SHOWN = 12


def of_join(worker: Worker, gradients: Gradients | None) -> dict[str, Any]:
    """Return the arguments of `elasticflow.join` by the keys of a job file; in exact mode the digests of the project's code, too."""
    settings: dict[str, Any] = {"job.seed": worker.seed}
    if gradients is not None:
        settings["train.precision"] = gradients.precision
    if gradients is not None and gradients.virtual_shards is not None:
        settings |= {"train.consistency": "exact", "train.virtual_shards": gradients.virtual_shards}
        if worker.layout.is_offloaded:
            settings["parallel.offload"] = "cpu"
        digests = environment.digests_of_script()
        settings |= {f"{_SOURCES}{name}": digest[:_DIGEST_SHOWN] for name, digest in digests.items()}
    return settings


def of_batches(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of `Run.batches` by the keys of a job file, but for those that are None."""
    keys = {argument: key for key, argument in _ARGUMENTS.items()}
    return {keys[name]: value for name, value in arguments.items() if value is not None}


def is_of_batches(key: str) -> bool:
    """Return True if this is an argument of `Run.batches`, not of `elasticflow.join`."""
    return key.startswith("dataset.") or key in {"train.epochs", "train.steps"}


def require_same_on_ranks(worker: Worker, settings: Mapping[str, Any]) -> None:
    """Make sure that all ranks have the same arguments. Collective: every rank.

    Raises:
        StateError: a rank has another argument than rank 0; raised on every rank, with the argument's name.
    """
    if worker.world_size == 1:
        return
    ranks = [json.loads(text) for text in worker.gather_text(json.dumps(settings))]
    for rank, other in enumerate(ranks):
        for key in {**ranks[0], **other}:
            if other.get(key) != ranks[0].get(key):
                raise StateError(
                    f"{_name(key)} is {_shown(other.get(key))} on rank {rank}, and {_shown(ranks[0].get(key))} on rank 0",
                    "all ranks share one global batch and one order of samples: give every rank the same",
                )


def require_unchanged(worker: Worker, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the arguments of this start with those in the snapshot; log the differences. Every rank.

    Args:
        before: The snapshot's settings; keys that *now* does not speak of may be left out or in.

    Raises:
        LoopDriftError: a difference would corrupt the run, or changes its trajectory without consent.
    """
    is_wanted = os.environ.get(worker_environment.ACCEPT_DRIFT, "") not in ("", "0")
    told = []
    for key in {**before, **now}:
        was, value = before.get(key), now.get(key)
        # A module may be imported earlier in one start than in another.
        if was == value or (key.startswith(_SOURCES) and None in (was, value)):
            continue
        # A key that weighs more in exact mode is recorded in that mode alone.
        own = ("trajectory", BITS) if key.startswith(_SOURCES) else EXACT_WEIGHTS.get(key)
        weight, reason = own or weigh(key, was, value)
        change = f"{_name(key)} is {_shown(value)}, and was {_shown(was)} when the snapshot was taken"
        if weight == "corrupting":
            raise LoopDriftError(
                f"{change}: {reason}",
                "give it back what it was, or start another run: another name or folder",
            )
        if weight == "trajectory" and not is_wanted:
            raise LoopDriftError(
                f"{change}: {reason}",
                "give it back what it was, or say that the change is wanted: --accept-drift, or "
                f"{worker_environment.ACCEPT_DRIFT}=1 where the script is started by hand",
            )
        told.append({"key": _name(key), "was": was, "now": value, "reason": reason})
    if told and worker.rank == 0:
        worker.event(events.LOOP_CHANGED, changes=told)


def _name(key: str) -> str:
    """Return the name of a key in the script."""
    return _ARGUMENTS.get(key) or key.removeprefix(_SOURCES)


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
