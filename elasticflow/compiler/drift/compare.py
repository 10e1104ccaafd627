"""What differs between two resolved jobs, and how much it matters to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.inputs.job_json import public_tables, to_json
from elasticflow.jobfile.tables.evaluation import without_set
from elasticflow.protocol.key_weights import EXACT_WEIGHTS, LISTS, Weight, weigh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.tables.job import Job

# Batches of like length are cut where a batch ends.
_CUTS = "dataset.sampler.bucket_by: the order of samples depends on it"
_BUCKETED_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "dataset.global_batch_size": ("corrupting", _CUTS),
    "dataset.tail": ("corrupting", _CUTS),
}


@dataclass(frozen=True)
class Difference:
    """One key that differs.

    Attributes:
        key: Dotted, as in the job file: `optimizer.args.lr`.
        old: Value of the run so far; None if the key was not there.
        new: Value now; None if the key is gone.
        weight: What it does to a run that goes on: nothing, another trajectory, or corruption.
        reason: Why it has that weight.
    """

    key: str
    old: Any
    new: Any
    weight: Weight
    reason: str

    @property
    def is_of_the_job(self) -> bool:
        """Whether it is a key of the job, not one of what else a launch is made from (`compiler/drift/origins.py`)."""
        return self.key.partition(".")[0] not in {"sources", "versions", "machine", "git"}

    def to_json(self) -> dict[str, Any]:
        """Return it as job.json and events hold it."""
        return dict(to_json(asdict(self)))


def compare(old: Job, new: Job) -> list[Difference]:
    """Return what differs, in the order of the job file, keys that came last."""
    before, after = dict(_leaves(public_tables(old))), dict(_leaves(public_tables(new)))
    is_script = new.script is not None
    is_exact = not is_script and new.train.consistency == "exact"
    own_weights = dict(EXACT_WEIGHTS) if is_exact else {}
    if not is_script and new.dataset.sampler is not None and new.dataset.sampler.bucket_by is not None:
        own_weights |= _BUCKETED_WEIGHTS
    differences = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was != now or type(was) is not type(now):
            weight = own_weights.get("env" if key.startswith("env.") else key) or _weigh(key, was, now)
            differences.append(Difference(key, was, now, *weight))
    return differences


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # an empty one has no keys to differ in
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif key in LISTS:
        for number, group in enumerate(value):
            yield from _leaves(group, f"{key}.{number}")
    else:
        yield key, value


def _weigh(key: str, was: Any, now: Any) -> tuple[Weight, str]:
    parts = [str(part) for part in without_set(tuple(key.split(".")))]
    if ".".join(parts[:2]) in LISTS and len(parts) > 2:
        del parts[2]  # the number of the table
    return weigh(".".join(parts), was, now)
