"""Messages between a worker and its node's snapshot writer, and the writer's reports: one frozen dataclass each.

A worker sends a `ToWriter`, the writer a `ToWorker`, as JSON; see `TO_WRITER` and `TO_WORKER`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, assert_never, get_args

from elasticflow import events
from elasticflow.protocol.json_codec import MessageCodec
from elasticflow.snapshots.format.pieces import Part  # noqa: TC001
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard  # noqa: TC001
from elasticflow.storage.storage import Trouble

if TYPE_CHECKING:
    from elasticflow.events import EventRecord

FENCED = "fenced"
"""Reason of a failed snapshot: a later generation exists, started by another launch."""


@dataclass(frozen=True)
class SnapshotReport:
    """The outcome of a snapshot.

    Attributes:
        event: `snapshot.committed`, `snapshot.failed` or `snapshot.removed`.
        bytes: Size of the snapshot's files, if this node committed it; the next two are given then, too.
        seconds: From the first staged shard to the commit.
    """

    event: str
    name: str
    step: int
    generation: int
    bytes: int | None = None
    seconds: float | None = None
    trigger: str | None = None
    reason: str | None = None


WriterReport = SnapshotReport | Trouble


def as_event(report: WriterReport) -> EventRecord:
    """Return the report as an event without the fields that all events have."""
    match report:
        case SnapshotReport():
            return {key: value for key, value in vars(report).items() if value is not None}
        case Trouble():
            return {
                "event": events.STORE_TROUBLE,
                "operation": report.operation,
                "class": report.kind,
                "error": report.error,
                "attempt": report.attempt,
                "pause_s": round(report.pause_s, 1),
            }
        case _:
            assert_never(report)


@dataclass(frozen=True)
class CommittedPosition:
    """A snapshot that was committed out of the memory tier, and where in training it was taken."""

    name: str
    step: int
    epoch: int
    samples: int


# --- from a worker to its writer --------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of a worker; `Welcome` or `Refused` answers it.

    Attributes:
        part: Rows of sharded tensors that the worker holds; None: it holds whole ones.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    generation: int
    part: Part | None = None

    @property
    def is_single_node(self) -> bool:
        """True if all ranks are on this node."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class Reserve:
    """Make shared memory ready for this rank's shards; `Slots` or `NoSlots` answers it.

    Attributes:
        is_held: The slots are the memory tier's, whose content outlives this worker; else staging buffers.
        is_optional: Only if they take no more than half of the memory that is free, and two instead of three.
        is_more: A slot of the memory tier beside those that the worker has, until it gives one back.
    """

    nbytes: int
    is_held: bool
    is_optional: bool = False
    is_more: bool = False


@dataclass(frozen=True)
class GiveBack:
    """This rank gives back slot *number* of the memory tier, which has no label any more."""

    number: int


@dataclass(frozen=True)
class Stage:
    """Write the content of a staging buffer as this rank's shard of a snapshot.

    Attributes:
        slot: Number of the buffer; None: the shard has no bytes.
        refusal: The reason why the buffer lacks the shard, so that the snapshot fails; None: it has the shard.
    """

    name: str
    step: int
    slot: int | None
    shard: StagedShard
    refusal: str | None


@dataclass(frozen=True)
class GiveUp:
    """The shards of snapshot *name* that other nodes write do not come, for a *reason*: the writer need not wait for them."""

    name: str
    reason: str


@dataclass(frozen=True)
class Describe:
    """The layout of the following shards in their slots; labels refer to it by *number*, which the worker counts up."""

    number: int
    shard: StagedShard


@dataclass(frozen=True)
class RequestPersist:
    """Write a snapshot of the memory tier's state at *step* or later; `PersistBegun` follows."""

    step: int
    trigger: str


@dataclass(frozen=True)
class Recall:
    """Send the newest state that an earlier generation held; `Held` answers it.

    Attributes:
        older_than: Generation and step, of which an older state is wanted; empty: any.
    """

    older_than: tuple[int, ...] = ()


RECEIVED = 1
"""Number of the layout of a received state."""


@dataclass(frozen=True)
class Receive:
    """Make memory ready for a state that another node holds; `Receiving` answers it, and the worker fills and labels the slots.

    What this node held before is given up.

    Attributes:
        world_size: Ranks of that generation, on all nodes.
        committed: Newest snapshot that was committed out of the memory tier; None: none.
        shards: Layout of each part of the state; the first has the record.
    """

    generation: int
    world_size: int
    committed: CommittedPosition | None
    shards: tuple[StagedShard, ...]


@dataclass(frozen=True)
class Invalidate:
    """Forbid resuming from the state that this generation holds, and from its snapshots after step *equal_at*."""

    equal_at: int


@dataclass(frozen=True)
class Load:
    """Verify snapshot *name* and hand its files over; `LoadProgress` follows, then `LoadReady` or `LoadFailed`.

    Attributes:
        is_whole: Verify all of it, not only the rows that the node's workers hold.
    """

    name: str
    is_whole: bool = False


@dataclass(frozen=True)
class Unload:
    """This rank has read what it needs of the loaded snapshot."""


# --- from a writer to a worker ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The worker is served: older snapshots have an outcome, so the newest committed snapshot is final."""


@dataclass(frozen=True)
class Refused:
    """The worker is not served."""

    reason: str


@dataclass(frozen=True)
class Slots:
    """Shared memory that the worker may fill; the descriptors come with the message.

    Attributes:
        numbers: Numbers of the slots; in the memory tier the slot that was filled last comes last.
        sizes: Bytes of each.
        single: The reason why it is one staging buffer; None: there are two.
        is_more: The worker also keeps the slots that it has.
    """

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    single: str | None
    is_more: bool = False


@dataclass(frozen=True)
class Released:
    """Staging buffer *number* is written and may be filled again."""

    number: int


@dataclass(frozen=True)
class NoSlots:
    """There is no memory for the requested slots.

    Attributes:
        is_over_limit: `snapshots.staging_limit` does not allow it; else the machine has no memory.
        is_more: The worker keeps the slots that it has.
    """

    is_over_limit: bool
    reason: str
    is_more: bool = False


@dataclass(frozen=True)
class PersistBegun:
    """A snapshot out of the memory tier is being written."""

    name: str
    step: int
    trigger: str


@dataclass(frozen=True)
class HeldShard:
    """One rank's shard in the memory tier, the bytes of the slot that it lies in, and the digest of the shard's bytes."""

    size: int
    shard: StagedShard
    digest: int


@dataclass(frozen=True)
class HeldSet:
    """The state that all ranks of a generation held at one step.

    Attributes:
        name: Name that a snapshot of the state would have.
        world_size: Ranks of that generation, on all nodes.
        record: The same on every node.
        committed: Newest snapshot that was committed out of the memory tier; None: none.
        shards: By number of the rank on this node.
    """

    name: str
    generation: int
    step: int
    world_size: int
    record: SnapshotRecord
    committed: CommittedPosition | None
    shards: tuple[HeldShard, ...]


@dataclass(frozen=True)
class Held:
    """The held state; None: no whole set is on this node. The descriptors of the shards' slots come with the message."""

    held: HeldSet | None


@dataclass(frozen=True)
class Receiving:
    """Slots for a state of another node; their descriptors come with the message.

    Attributes:
        sizes: Bytes of each; empty: there is no memory for them.
        reason: The reason for that, for people.
    """

    sizes: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class LoadProgress:
    """Number of bytes of the snapshot that are verified so far."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class LoadReady:
    """The snapshot is verified; the descriptors of its files come with the message.

    Attributes:
        snapshot: From `LoadedSnapshot.to_json`.
    """

    name: str
    descriptors: int
    snapshot: dict[str, Any]


@dataclass(frozen=True)
class LoadFailed:
    """The snapshot is not handed over.

    Attributes:
        kind: damaged: it is not what was written; forbidden: the writer may not read it; unreadable: it cannot be
            read, which says nothing about it.
    """

    name: str
    kind: Literal["damaged", "forbidden", "unreadable"]
    reason: str


@dataclass(frozen=True)
class Report:
    """The outcome of a snapshot, or a report that the store is in trouble."""

    report: WriterReport


@dataclass(frozen=True)
class RetentionDone:
    """Snapshot *name* has its outcome, and retention has run after it."""

    name: str


ToWriter = (
    Hello
    | Reserve
    | GiveBack
    | Stage
    | GiveUp
    | Describe
    | RequestPersist
    | Recall
    | Receive
    | Invalidate
    | Load
    | Unload
)
ToWorker = (
    Welcome
    | Refused
    | Slots
    | Released
    | NoSlots
    | PersistBegun
    | Held
    | Receiving
    | LoadProgress
    | LoadReady
    | LoadFailed
    | Report
    | RetentionDone
)


TO_WRITER: MessageCodec[ToWriter] = MessageCodec(*get_args(ToWriter))
TO_WORKER: MessageCodec[ToWorker] = MessageCodec(*get_args(ToWorker))
