"""Messages between a worker and its node's snapshot writer: one frozen dataclass each.

A worker sends a `ToWriter`, the writer a `ToWorker`. Each is one JSON object whose `type` is the name of its class;
`encode`, `to_writer` and `to_worker` are the only places that know that form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from elasticflow.snapshots.client import writer_reports
from elasticflow.snapshots.client.writer_reports import SnapshotReport
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard
from elasticflow.storage.storage import Trouble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.snapshots.client.writer_reports import WriterReport


class _Message:
    """A message whose JSON form is that of its fields."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(**fields)


class _WithShard(_Message):
    """A message with a field `shard`."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(**{**fields, "shard": StagedShard.from_json(fields["shard"])})


# --- from a worker to its writer --------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(_Message):
    """The first message of a worker; `Welcome` or `Refused` answers it."""

    rank: int
    world_size: int
    local_world_size: int
    generation: int

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class Reserve(_Message):
    """Make shared memory ready for this rank's shards; `Slots`, `OverLimit` or `NoMemory` answers it.

    Attributes:
        nbytes: Of each slot, at least.
        is_held: What lies there outlives this worker: slots of the memory tier. Else staging buffers.
    """

    nbytes: int
    is_held: bool


@dataclass(frozen=True)
class Stage(_WithShard):
    """Write what lies in a staging buffer as this rank's shard of a snapshot.

    Attributes:
        name: The snapshot's.
        step: Finished steps.
        slot: Number of the buffer; None: the shard has no bytes.
        shard: What lies there.
    """

    name: str
    step: int
    slot: int | None
    shard: StagedShard


@dataclass(frozen=True)
class Describe(_WithShard):
    """How the shards that follow lie in their slots; labels refer to it by *number*, which the worker counts up."""

    number: int
    shard: StagedShard


@dataclass(frozen=True)
class RequestPersist(_Message):
    """Write a snapshot of what the memory tier holds at *step* or later; `PersistBegun` follows."""

    step: int
    trigger: str


@dataclass(frozen=True)
class Recall(_Message):
    """Send what the newest earlier generation held; `Held` answers it."""


@dataclass(frozen=True)
class Invalidate(_Message):
    """Have nobody go on from what this generation holds, or from a snapshot taken of it after step *equal_at*."""

    equal_at: int


@dataclass(frozen=True)
class Load(_Message):
    """Verify snapshot *name* and hand its files over; `LoadProgress` follows, then `LoadReady` or `LoadFailed`."""

    name: str


@dataclass(frozen=True)
class Unload(_Message):
    """This rank has read what it needs of the loaded snapshot."""


# --- from a writer to a worker ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(_Message):
    """Older snapshots have an outcome: the newest committed snapshot is final."""


@dataclass(frozen=True)
class Refused(_Message):
    """The worker is not served."""

    reason: str


@dataclass(frozen=True)
class Slots(_Message):
    """Shared memory that the worker may fill; the descriptors come with the message.

    Attributes:
        numbers: Of the slots. In the memory tier the slot that was filled last comes last.
        sizes: Bytes of each.
        single: Why it is one staging buffer instead of two, if so.
    """

    numbers: Sequence[int]
    sizes: Sequence[int]
    single: str | None


@dataclass(frozen=True)
class Released(_Message):
    """Staging buffer *number* is written and may be filled again."""

    number: int


@dataclass(frozen=True)
class NoMemory(_Message):
    """The machine has no memory for what was asked."""

    reason: str


@dataclass(frozen=True)
class OverLimit(_Message):
    """`snapshots.staging_limit` does not allow what was asked."""

    reason: str


@dataclass(frozen=True)
class PersistBegun(_Message):
    """A snapshot out of the memory tier is being written."""

    name: str
    step: int
    trigger: str


@dataclass(frozen=True)
class HeldShard:
    """One rank's shard in the memory tier, and the bytes of the slot that it lies in."""

    size: int
    shard: StagedShard


@dataclass(frozen=True)
class CommittedPosition:
    """A snapshot that was committed out of the memory tier, and where in training it was taken."""

    name: str
    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class HeldSet:
    """What all ranks of a generation held at one step.

    Attributes:
        name: What a snapshot of it would be called.
        generation: Of the ranks.
        step: Finished steps.
        record: Rank 0's.
        committed: Newest snapshot that was committed out of the memory tier; None: none.
        shards: By rank.
    """

    name: str
    generation: int
    step: int
    record: SnapshotRecord
    committed: CommittedPosition | None
    shards: tuple[HeldShard, ...]


@dataclass(frozen=True)
class Held(_Message):
    """What was held; None: no whole set. A `HeldMemory` for each shard follows."""

    held: HeldSet | None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Held:
        """Return the message with these fields."""
        if (held := fields["held"]) is None:
            return cls(None)
        record = SnapshotRecord.from_json(held["record"])
        committed = None if held["committed"] is None else CommittedPosition(**held["committed"])
        shards = tuple(
            HeldShard(shard["size"], StagedShard.from_json(shard["shard"])) for shard in held["shards"]
        )
        return cls(HeldSet(**{**held, "record": record, "committed": committed, "shards": shards}))


@dataclass(frozen=True)
class HeldMemory(_Message):
    """The descriptor of the next shard's slot comes with this message."""


@dataclass(frozen=True)
class LoadProgress(_Message):
    """So many bytes of the snapshot were verified."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class LoadReady(_Message):
    """The snapshot is verified; the descriptors of its files come with the message.

    Attributes:
        name: The snapshot's.
        descriptors: How many there are.
        snapshot: From `LoadedSnapshot.to_json`.
    """

    name: str
    descriptors: int
    snapshot: dict[str, Any]


@dataclass(frozen=True)
class LoadFailed(_Message):
    """The snapshot is not handed over.

    Attributes:
        name: The snapshot's.
        kind: damaged: it is not what was written; forbidden: the writer may not read it; unreadable: it cannot be
            read, which says nothing about it.
        reason: For people.
    """

    name: str
    kind: Literal["damaged", "forbidden", "unreadable"]
    reason: str


@dataclass(frozen=True)
class Report(_Message):
    """What became of a snapshot, or that the store is in trouble."""

    report: WriterReport

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(writer_reports.from_json(fields["report"]))


@dataclass(frozen=True)
class RetentionDone(_Message):
    """Snapshot *name* has its outcome, and retention has run after it."""

    name: str


ToWriter = Hello | Reserve | Stage | Describe | RequestPersist | Recall | Invalidate | Load | Unload
ToWorker = (
    Welcome
    | Refused
    | Slots
    | Released
    | NoMemory
    | OverLimit
    | PersistBegun
    | Held
    | HeldMemory
    | LoadProgress
    | LoadReady
    | LoadFailed
    | Report
    | RetentionDone
)
_TO_WRITER: dict[str, type[ToWriter]] = {cls.__name__: cls for cls in get_args(ToWriter)}
_TO_WORKER: dict[str, type[ToWorker]] = {cls.__name__: cls for cls in get_args(ToWorker)}


def encode(message: ToWriter | ToWorker) -> bytes:
    """Return *message* as JSON; nothing of it is copied first: a snapshot's state may be large."""
    content = {"type": type(message).__name__, **vars(message)}
    return json.dumps(content, allow_nan=False, default=_fields).encode()


def _fields(value: Any) -> dict[str, Any]:
    """Return what stands in JSON for a record inside a message."""
    match value:
        case SnapshotRecord():
            return value.to_json()
        case SnapshotReport() | Trouble():
            return writer_reports.to_json(value)
        case _:
            fields: dict[str, Any] = vars(value)
            return fields


def to_writer(data: bytes) -> ToWriter:
    """Return the message of a worker that `encode` gave."""
    fields = json.loads(data)
    return _TO_WRITER[fields.pop("type")].from_json(fields)


def to_worker(data: bytes) -> ToWorker:
    """Return the message of a writer that `encode` gave."""
    fields = json.loads(data)
    return _TO_WORKER[fields.pop("type")].from_json(fields)
