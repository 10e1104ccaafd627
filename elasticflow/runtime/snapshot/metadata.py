"""Rank 0's part of a snapshot beside tensors: state.json and the facts of the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StateError
from elasticflow.run_folder import snapshot_name
from elasticflow.runtime.data.order.order import OTHER_VERSION, VERSION
from elasticflow.runtime.process import environment, random_streams
from elasticflow.runtime.process.position import Position
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from torch import nn

    from elasticflow.runtime.data.order.order import OrderRecord
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Schedule
    from elasticflow.runtime.state.state import Captured, State

FROZEN = "frozen"
"""Key of a script's loop record: names of the parameters that are not trained."""
WRAPPED = "wrapped"
"""Key of a script's loop record: names of frozen parameters that were trained when `Run.wrap` was called; left out if there are none."""
RESTING = "resting"
"""Key of a script's loop record: names of the modules that are in evaluation mode."""


def resting(model: nn.Module) -> list[str]:
    """Return the names of the modules of *model* that are in evaluation mode."""
    return [name for name, module in model.named_modules() if not module.training]


def frozen(model: nn.Module) -> list[str]:
    """Return the names of the parameters of *model* that are not trained."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


@dataclass(frozen=True)
class StateRecord:
    """Content of state.json.

    Attributes:
        order: Identity of the order of samples in which the position counts.
        draws_random: The model or the optimizer draws from python's or numpy's generator.
        options: Options of the optimizers and schedules as the job made them; None: unknown.
        loop: Arguments of a script's loop (`loop/drift.py`); None for job files.
        scalars: Names of the job's own scalars, in the order of their places; see `runtime/training/scalars.py`.
        stop: Why the job's own code ended training at this position; None: it did not.
        end_wanted: Why the script has called `Run.stop`, which ends training some steps later; None: it has not.
    """

    position: Position
    order: OrderRecord
    samples: int | None
    global_batch_size: int
    seed: int
    draws_random: bool
    job: str
    job_digest: str
    tree: dict[str, Any]
    options: dict[str, Any] | None
    loop: dict[str, Any] | None = None
    scalars: tuple[str, ...] = ()
    stop: str | None = None
    end_wanted: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of state.json."""
        return {
            "position": self.position._asdict(),
            "order": self.order,
            "schedule": {"samples": self.samples, "global_batch_size": self.global_batch_size},
            "seed": self.seed,
            "random": random_streams.VERSION,
            "draws_random": self.draws_random,
            "job": self.job,
            "job_digest": self.job_digest,
            "options": self.options,
            **({} if self.loop is None else {"loop": self.loop}),
            "scalars": list(self.scalars),
            **({} if self.stop is None else {"stop": self.stop}),
            **({} if self.end_wanted is None else {"end_wanted": self.end_wanted}),
            "state": self.tree,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StateRecord:
        """Return the record in the content of state.json.

        Raises:
            StateError: the snapshot's position or random states follow rules that this version does not know.
        """
        if (version := content.get("random")) != random_streams.VERSION:
            raise StateError(
                f"the snapshot's random states follow rules {version}, and this version of elasticflow knows rules "
                f"{random_streams.VERSION} only",
                OTHER_VERSION,
            )
        schedule = content["schedule"]
        return cls(
            position=position_of(content),
            order=order_of(content),
            samples=schedule["samples"],
            global_batch_size=schedule["global_batch_size"],
            seed=content["seed"],
            draws_random=content["draws_random"],
            job=content["job"],
            job_digest=content["job_digest"],
            tree=content["state"],
            options=content.get("options"),
            loop=content.get("loop"),
            # Older snapshots do not have it.
            scalars=tuple(content.get("scalars", ())),
            stop=content.get("stop"),
            end_wanted=content.get("end_wanted"),
        )


def position_of(content: Mapping[str, Any]) -> Position:
    """Return the position in state.json."""
    position = content["position"]
    # JSON has no tuples.
    tuples = {name: tuple(position.get(name, ())) for name in ("cursors", "stage")}
    return Position(**{**position, **tuples})


def order_of(content: Mapping[str, Any]) -> OrderRecord:
    """Return the identity of the order of samples in state.json."""
    # Older snapshots do not have it.
    order: OrderRecord = content.get("order", VERSION)
    return order


class SnapshotMetadata:
    """Makes names and records of snapshots.

    Attributes:
        fingerprints: Fingerprints of the datasets, by name; a loop of the script's own sets them late.
        parent: The committed snapshot that this generation resumes from, if any.
        loop: Arguments of a script's loop; None for a job file.
        past_data: Fingerprints of the data of stages that have ended, by name.
        wrapped: `id` of the parameters that were trained when `Run.wrap` was called.
        end_wanted: Why some rank has called `Run.stop`, until that ends training.
    """

    def __init__(self, me: Worker, state: State, schedule: Schedule, fingerprints: Mapping[str, str]) -> None:
        self._me, self._state, self._evaluation, self._schedule = me, state, state.evaluation, schedule
        self._environment = environment.describe(me.device)
        self.fingerprints = fingerprints
        self._options = state.options.to_json()
        self.parent: str | None = None
        self.loop: dict[str, Any] | None = None
        self.past_data: dict[str, str] = {}
        self.wrapped: AbstractSet[int] = frozenset()
        self.end_wanted: str | None = None

    def name(self, step: int) -> str:
        """Return the name of the snapshot of *step*; the same on every rank."""
        me = self._me
        text = f"{me.run_id}/{step}/{me.generation}".encode()
        return snapshot_name(step, me.generation, blake2b(text, digest_size=4).hexdigest())

    def record(
        self, position: Position, captured: Captured, trigger: str, *, on_each_node: bool = False
    ) -> SnapshotRecord | None:
        """Return the record that rank 0, or the first rank *on_each_node*, sends with its shard; None on other ranks."""
        me, evaluation = self._me, self._evaluation
        if (me.local_rank if on_each_node else me.rank) != 0:
            return None
        model = self._state.model
        state = StateRecord(
            position=position,
            order=self._schedule.order_record,
            samples=self._schedule.samples,
            global_batch_size=self._schedule.global_batch_size,
            seed=me.seed,
            draws_random=me.generators.look(),
            job=me.job,
            job_digest=me.job_digest,
            tree=captured.tree,
            options=self._options,
            loop=None if self.loop is None else {**self.loop, **self._modes_of(model)},
            scalars=tuple(me.scalar_names),
            stop=me.own_reason_to_stop(),
            end_wanted=self.end_wanted,
        )
        facts = ManifestFacts(
            trigger=trigger,
            parent=self.parent,
            metric=None if evaluation is None else evaluation.ranking.metric_at(position),
            ranked_by=None if evaluation is None else evaluation.ranking.measure,
            epoch=position.epoch,
            samples=position.samples,
            aliases=captured.aliases,
            memory_formats=captured.memory_formats,
            fingerprints={**self.fingerprints, **self.past_data},
            versions=self._environment,
        )
        return SnapshotRecord(state.to_json(), facts)

    def _modes_of(self, model: nn.Module) -> dict[str, list[str]]:
        still = frozen(model)
        wrapped = [name for name in still if id(model.get_parameter(name)) in self.wrapped]
        return {FROZEN: still, RESTING: resting(model), **({WRAPPED: wrapped} if wrapped else {})}
