"""The memory tier as workers of one node, their successors and the store see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.errors import SnapshotError, StagingLimitError
from elasticflow.snapshots import memory
from elasticflow.snapshots.client.memory_tier import MemoryTierClient
from elasticflow.snapshots.client.messages import CommittedPosition, PersistBegun, RequestPersist
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
from elasticflow.snapshots.memory import digest_of
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.writer.memory_tier import MemoryTierSlots
from elasticflow.system import fault_injection
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.client.writer_process import WriterProcess
    from elasticflow.snapshots.memory import Slot

ROOT = Path(__file__).parents[2]
SIZE = 1000


@dataclass
class Rank:
    """One rank with its slots."""

    client: StagingClient
    tier: MemoryTierClient
    rank: int
    generation: int
    size: int = SIZE

    def record(self, step: int) -> SnapshotRecord | None:
        """What rank 0 gives with its share."""
        facts = ManifestFacts(trigger="memory", samples=step * 10)
        state = {"position": {"step": step}, "state": {"rest": {"lr": 0.5}}}
        return SnapshotRecord(state, facts) if self.rank == 0 else None

    def hold(self, step: int) -> Slot:
        """Fill a slot with bytes that tell step and rank."""
        slot = self.fill(step)
        assert self.tier.commit_slot(slot, Bench.name_of(step, self.generation), step, self.record(step))
        return slot

    def fill(self, step: int) -> Slot:
        """The same, up to the moment before it counts."""
        slot = self.tier.next_slot(20)
        assert slot is not None
        slot.memory[: self.size] = Bench.content(step, self.rank, self.size)
        return slot


def joined(
    bench: Bench, writer: WriterProcess, world: int = 2, generation: int = 1, size: int = SIZE
) -> list[Rank]:
    """Connect all ranks of a generation."""
    ranks = []
    for rank in range(world):
        client = bench.connect(writer, rank, world, generation=generation)
        ranks.append(Rank(client, MemoryTierClient(client, generation), rank, generation, size))
    return ranks


def settled(ranks: list[Rank]) -> list[Rank]:
    """Have each rank take its slots and tell how its shares are laid out."""
    for rank in ranks:
        entries = [TensorEntry(f"a{rank.rank}", "U8", (rank.size,), 0, rank.size)]
        rank.tier.reserve(rank.size)
        rank.tier.describe(entries, rank.size, rank.record(0))
    return ranks


def die(ranks: list[Rank]) -> None:
    """End the connections, as dead processes do."""
    for rank in ranks:
        rank.client.close()


def recalled(ranks: list[Rank]) -> list[tuple[int, list[bytes]] | None]:
    """What each rank is told is held: step and all shares."""
    found = []
    for rank in ranks:
        held = rank.tier.recall()
        found.append(
            None
            if held is None
            else (held.held.step, [bytes(memory[: entries[0].nbytes]) for entries, memory in held.shards])
        )
    return found


def content(step: int, world: int = 2, size: int = SIZE) -> tuple[int, list[bytes]]:
    """What `recalled` gives for a whole set of *step*."""
    return step, [Bench.content(step, rank, size) for rank in range(world)]


def test_successors_go_on_from_the_newest_step_that_every_rank_has(bench: Bench) -> None:
    """Rank 0 was one step ahead when all died: the step before is what their successors are given."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for step in range(1, 8):
        for rank in first:
            rank.hold(step)
    first[0].hold(8)
    die(first)
    second = joined(bench, writer, generation=2)
    assert [content(7), content(7)] == recalled(second)
    held = second[0].tier.recall()
    assert held is not None
    assert (Bench.name_of(7), 7, None) == (held.held.name, held.held.step, held.held.committed)
    assert {"position": {"step": 7}, "state": {"rest": {"lr": 0.5}}} == held.held.record.state
    assert 70 == held.held.record.manifest.samples
    assert [] == bench.catalog.committed()


def test_death_in_the_midst_of_a_copy_spoils_nothing(bench: Bench) -> None:
    """A rank that dies while it fills a slot leaves the step before whole, and its lock with the kernel."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for step in (1, 2, 3):
        for rank in first:
            rank.hold(step)
    first[0].hold(4)
    first[1].fill(4)
    die(first)
    assert [content(3), content(3)] == recalled(joined(bench, writer, generation=2))


def test_held_set_survives_a_successor_that_held_nothing(bench: Bench) -> None:
    """Generation 2 takes over the slots and dies before its first step is whole: generation 3 is given the same."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for rank in first:
        rank.hold(5)
    die(first)
    second = settled(joined(bench, writer, generation=2))
    second[0].hold(6)
    second[1].fill(6)
    die(second)
    third = joined(bench, writer, generation=3)
    assert [content(5), content(5)] == recalled(third)
    for rank in settled(third):
        rank.hold(6)
    die(third)
    assert [content(6), content(6)] == recalled(joined(bench, writer, generation=4))


def test_rank_without_bytes_takes_part(bench: Bench) -> None:
    """More ranks than tensors: a rank whose shard is empty holds it like the others, and does not wait for ever."""
    first, second = joined(bench, bench.writer())
    first.tier.reserve(SIZE)
    first.tier.describe([TensorEntry("a0", "U8", (SIZE,), 0, SIZE)], SIZE, first.record(0))
    second.tier.reserve(0)
    second.tier.describe([], 0, None)
    first.hold(3)
    assert second.tier.commit_slot(second.tier.next_slot(20), Bench.name_of(3), 3, None)
    for rank in (first, second):
        rank.client.request_persist(3, "steps")
    assert [("snapshot.committed", 3)] == bench.outcomes(second.client.flush(20))


def test_slots_are_taken_over(bench: Bench) -> None:
    """Three buffers for each rank are all there ever are, over restarts and many steps."""
    writer = bench.writer()
    for generation in (1, 2, 3):
        ranks = settled(joined(bench, writer, generation=generation, size=100_000))
        for step in range(generation * 10, generation * 10 + 8):
            for rank in ranks:
                rank.hold(step)
        die(ranks)
    assert 6 == len(staging_files(writer.process.pid))


def test_zombie_keeps_successors_from_its_memory(bench: Bench) -> None:
    """A rank that outlived its generation could still write: nothing is given out until it is gone."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for rank in first:
        rank.hold(3)
    die(first[1:])
    second = joined(bench, writer, generation=2)
    assert [None, None] == recalled(second)
    for rank in settled(second):
        rank.hold(2)
    first[0].hold(9)
    first[0].client.request_persist(9, "steps")
    time.sleep(0.2)
    assert [] == bench.catalog.committed()
    die(first)
    die(second)
    assert [content(2), content(2)] == recalled(joined(bench, writer, generation=3))


def test_nothing_is_recalled_once_a_rank_found_that_replicas_differ(bench: Bench) -> None:
    """One rank says so and ends, while the writer has a set in its hands: no set is whole for their successors.

    What was committed while the replicas were equal stays good.
    """
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for rank in first:
        rank.hold(3)
    for rank in first:
        rank.client.request_persist(3, "steps")
    while not first[0].client.reports():
        time.sleep(0.001)
    writer.process.send_signal(signal.SIGSTOP)
    for step in (4, 5):
        for rank in first:
            rank.hold(step)
    first[1].tier.invalidate(equal_at=3)
    die(first)
    writer.process.send_signal(signal.SIGCONT)
    second = joined(bench, writer, generation=2)
    assert [None, None] == recalled(second)
    assert [3] == [found.step for found in bench.catalog.committed()]
    for rank in settled(second):
        rank.hold(4)
    die(second)
    assert [content(4), content(4)] == recalled(joined(bench, writer, generation=3))


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_was_taken_after_the_last_comparison_is_not_gone_on_from(
    bench: Bench, is_committed: bool
) -> None:
    """A wish of step 4 took step 5, and then the replicas were found to differ: 5 is set aside or never committed."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for step in (4, 5):
        for rank in first:
            rank.hold(step)
    for rank in first:
        rank.client.request_persist(4, "steps")
    if is_committed:
        assert [("snapshot.committed", 5)] == bench.outcomes(first[0].client.flush(20))
    for rank in first:
        rank.tier.invalidate(equal_at=4)
    die(first)
    joined(bench, writer, generation=2)
    assert [] == bench.catalog.committed()
    if is_committed:
        (reason,) = bench.catalog.quarantined().values()
        assert "last known to be equal after step 4" in reason


def test_older_state_is_given_where_the_newest_is_not_wanted(bench: Bench) -> None:
    """Each older set can be asked for; older than the oldest there is none."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    for step in (1, 2, 3):
        for rank in first:
            rank.hold(step)
    die(first)
    (rank, _) = joined(bench, writer, generation=2)
    found = [rank.tier.recall(older) for older in ((), (1, 3), (1, 2), (1, 1))]
    assert [3, 2, 1, None] == [None if held is None else held.held.step for held in found]


def test_group_over_two_nodes_is_given_what_this_one_has(bench: Bench) -> None:
    """All ranks of a group were on this node; of the next group one is elsewhere."""
    writer = bench.writer()
    first = settled(joined(bench, writer, world=1))
    first[0].hold(3)
    die(first)
    wide = bench.connect(writer, 0, 2, local_world_size=1, generation=2)
    held = MemoryTierClient(wide, 2).recall()
    assert held is not None
    assert (3, 1) == (held.held.step, held.held.world_size)


def on_two_nodes(bench: Bench) -> list[Rank]:
    """Hold step 5 on two nodes with a rank each, of which each has its own shard and a copy of the other's."""
    ranks = []
    for number in (0, 1):
        client = bench.connect(bench.writer(), number, 2, local_world_size=1)
        rank = Rank(client, MemoryTierClient(client, 1), number, 1, 2 * SIZE)
        entries = [
            TensorEntry(f"a{number}", "U8", (SIZE,), 0, SIZE),
            TensorEntry(f"a{1 - number}", "U8", (SIZE,), SIZE, SIZE, is_copy=True),
        ]
        # The first rank of each node has the record.
        record = SnapshotRecord({"position": {"step": 5}}, ManifestFacts(trigger="memory"))
        rank.tier.reserve(2 * SIZE)
        rank.tier.describe(entries, 2 * SIZE, record)
        slot = rank.tier.next_slot(20)
        slot.memory[: 2 * SIZE] = Bench.content(5, number, SIZE) + Bench.content(5, 1 - number, SIZE)
        assert rank.tier.commit_slot(slot, Bench.name_of(5), 5, record)
        ranks.append(rank)
    return ranks


def test_each_node_writes_its_own_shard_of_what_all_have(bench: Bench) -> None:
    """The snapshot has each tensor once, and is that of two ranks."""
    ranks = on_two_nodes(bench)
    for rank in ranks:
        rank.client.request_persist(5, "steps")
    for rank in ranks:
        assert [("snapshot.committed", 5)] == bench.outcomes(rank.client.flush(20))
    (found,) = bench.catalog.committed()
    assert (2, {"a0", "a1"}) == (found.world_size, {*found.tensors})
    assert found.tensors["a0"].file != found.tensors["a1"].file
    assert [] == verify.verify(bench.catalog, found)


def test_at_the_end_the_node_of_rank_0_writes_all(bench: Bench) -> None:
    """Both launches end after a crash: the state is on the store once, whole."""
    die(on_two_nodes(bench))
    for writer in reversed(bench.writers):
        writer.finish(20)
    (found,) = bench.catalog.committed()
    assert ("crash", 2, {"a0", "a1"}) == (found.trigger, found.world_size, {*found.tensors})
    assert [] == verify.verify(bench.catalog, found)


def test_node_that_received_a_state_has_it(bench: Bench) -> None:
    """A new node has none, then memory for it, and once the shards are labelled the state, whose successors find it."""
    die(on_two_nodes(bench))
    source = MemoryTierClient(bench.connect(bench.writers[0], 0, 2, local_world_size=1, generation=2), 2)
    state = source.recall()
    assert state is not None
    new = bench.writer()
    tier = MemoryTierClient(bench.connect(new, 1, 2, local_world_size=1, generation=2), 2)
    assert tier.recall() is None
    memories = tier.prepare_to_receive(state.held)
    assert not isinstance(memories, str)
    memories[0][:SIZE] = state.memories[0][:SIZE]
    assert tier.recall() is None, "half of it came"
    memories[0][SIZE : 2 * SIZE] = state.memories[0][SIZE : 2 * SIZE]
    tier.count_received(state.held, memories)
    received = tier.recall()
    assert received is not None
    assert (state.age, state.held.record) == (received.age, received.held.record)
    assert state.held.name == received.held.name
    assert bytes(state.memories[0][: 2 * SIZE]) == bytes(received.memories[0][: 2 * SIZE])
    assert received.damaged(0, 1) is None
    memories[0][3] ^= 1
    assert 0 == received.damaged(0, 1)
    # It was not held by a rank of this node, which would write it at the end.
    new.finish(20)
    assert [] == bench.catalog.committed()


def test_node_without_memory_for_a_state_says_so(bench: Bench) -> None:
    """The limit allows no slot: the figures are the reason."""
    die(on_two_nodes(bench))
    source = MemoryTierClient(bench.connect(bench.writers[0], 0, 2, local_world_size=1, generation=2), 2)
    state = source.recall()
    assert state is not None
    new = bench.writer(staging_limit=4096)
    tier = MemoryTierClient(bench.connect(new, 1, 2, local_world_size=1, generation=2), 2)
    refused = tier.prepare_to_receive(state.held)
    assert isinstance(refused, str)
    assert "4096 are allowed" in refused
    assert tier.recall() is None


def test_wish_is_written_with_what_was_held(bench: Bench) -> None:
    """A wish at step 4 commits step 4, verified, with the trigger of the wish; every rank hears of it."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer))
    for step in (3, 4):
        for rank in ranks:
            rank.hold(step)
    for rank in ranks:
        rank.client.request_persist(4, "steps")
    for rank in ranks:
        assert [("snapshot.committed", 4)] == bench.outcomes(rank.client.flush(20))
    (found,) = bench.catalog.committed()
    assert ("steps", 40, 1, None) == (found.trigger, found.samples, found.generation, found.parent)
    assert [] == verify.verify(bench.catalog, found)
    assert {"position": {"step": 4}, "state": {"rest": {"lr": 0.5}}} == verify.read_state(
        bench.catalog, found
    )


def test_wishes_are_coalesced_while_the_store_is_busy(bench: Bench) -> None:
    """Wishes at every step of a slow store: training never waits, some steps are committed, the last one always."""
    writer = bench.writer(keep_last=100)
    ranks = settled(joined(bench, writer, size=20_000_000))
    for step in range(1, 31):
        for rank in ranks:
            rank.hold(step)
        for rank in ranks:
            rank.client.request_persist(step, "steps")
    for rank in ranks:
        rank.client.flush(60)
    steps = [found.step for found in bench.catalog.committed()]
    assert 30 == steps[0]
    assert 1 in steps
    assert len(steps) < 30
    for found in bench.catalog.committed():
        assert [] == verify.verify(bench.catalog, found)
        place = found.tensors["a1"]
        shard = bench.catalog.storage.read(f"snapshots/{found.name}/{place.file}")
        assert shard[place.offset :] == Bench.content(found.step, 1, 20_000_000)


def test_what_is_being_written_is_not_filled(bench: Bench) -> None:
    """While the writer is stopped with a set in its hands, ranks continue in the other slots."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer, world=1, size=50_000_000))
    ranks[0].hold(1)
    ranks[0].client.request_persist(1, "steps")
    while not (begun := ranks[0].client.reports()):
        time.sleep(0.001)
    assert isinstance(begun[0], PersistBegun)
    writer.process.send_signal(signal.SIGSTOP)
    used = {ranks[0].hold(step).descriptor for step in range(2, 9)}
    writer.process.send_signal(signal.SIGCONT)
    assert len(used) in (2, 3)  # 3: it had been written in that moment
    ranks[0].client.flush(20)
    (found,) = bench.catalog.committed()
    assert [] == verify.verify(bench.catalog, found)
    place = found.tensors["a0"]
    shard = bench.catalog.storage.read(f"snapshots/{found.name}/{place.file}")
    assert shard[place.offset :] == Bench.content(1, 0, 50_000_000)


def test_wish_of_the_dead_is_kept_and_named_to_successors(bench: Bench) -> None:
    """Workers die right after a wish: it is committed before successors are answered, who hear of it."""
    writer = bench.writer(limits={"fence_grace_s": 20.0})
    bench.catalog.claim_generation({})
    first = settled(joined(bench, writer))
    for rank in first:
        rank.hold(5)
    for rank in first:
        rank.client.request_persist(5, "steps")
    for rank in first:
        rank.hold(6)
    die(first)
    bench.catalog.claim_generation({})
    second = joined(bench, writer, generation=2)
    (found,) = bench.catalog.committed()
    assert found.step in (5, 6)
    held = second[0].tier.recall()
    assert held is not None
    place = CommittedPosition(found.name, found.step, epoch=0, samples=found.step * 10)
    assert (6, place) == (held.held.step, held.held.committed)


def test_what_is_held_is_committed_at_the_end_of_a_launch(bench: Bench) -> None:
    """The launch ends after a crash, and nobody wished for a snapshot: the newest held set is not lost."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer))
    for rank in ranks:
        rank.hold(5)
    die(ranks)
    writer.finish(20)
    (found,) = bench.catalog.committed()
    assert (5, "crash") == (found.step, found.trigger)
    assert [] == verify.verify(bench.catalog, found)


def test_what_the_store_did_not_take_is_committed_at_the_end_of_a_launch(bench: Bench) -> None:
    """The disk was full when the newest step was to be written; it has room again when the workers are gone."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer))
    for rank in ranks:
        rank.hold(5)
    with bench.small_files(writer, 100):
        for rank in ranks:
            rank.client.request_persist(5, "steps")
        assert [("snapshot.failed", 5)] == bench.outcomes(ranks[0].client.flush(20))
    die(ranks)
    writer.finish(20)
    (found,) = bench.catalog.committed()
    assert (5, "crash", []) == (found.step, found.trigger, verify.verify(bench.catalog, found))


def test_same_step_is_never_written_twice(bench: Bench) -> None:
    """The last step was committed already when the end asks for it: one snapshot, no failure."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer, world=1))
    ranks[0].hold(5)
    for trigger in ("steps", "end"):
        ranks[0].client.request_persist(5, trigger)
    assert [("snapshot.committed", 5)] == bench.outcomes(ranks[0].client.flush(20))
    ranks[0].client.close()
    writer.finish(20)
    assert [5] == [found.step for found in bench.catalog.committed()]


def test_wish_of_a_slower_rank_is_the_same_wish(bench: Bench) -> None:
    """One rank's wish was granted, and newer steps are held when the other's comes: nothing more is written."""
    writer = bench.writer()
    ranks = settled(joined(bench, writer))
    for rank in ranks:
        rank.hold(5)
    # Each is answered once what it sent before has been read: the writer has both outlines, and may grant a wish.
    assert [rank.tier.recall() for rank in ranks][-1] is not None
    ranks[0].client.request_persist(5, "steps")
    assert [("snapshot.committed", 5)] == bench.outcomes(ranks[0].client.flush(20))
    for rank in ranks:
        rank.hold(6)
    ranks[1].client.send(RequestPersist(5, "steps"))  # as if it had not heard yet
    die(ranks)
    assert [content(6), content(6)] == recalled(joined(bench, writer, generation=2))
    assert [5] == [found.step for found in bench.catalog.committed()]


def test_record_that_changed_much_is_told_anew(bench: Bench) -> None:
    """What is too much for a label goes into a new outline, and comes back whole."""
    writer = bench.writer()
    (rank,) = settled(joined(bench, writer, world=1))
    rank.hold(1)
    record = rank.record(2)
    assert record is not None
    record.state["rest"] = {"words": ["long"] * 10_000}
    slot = rank.fill(2)
    name = Bench.name_of(2)
    assert not rank.tier.commit_slot(slot, name, 2, record)
    rank.tier.describe([TensorEntry("a0", "U8", (SIZE,), 0, SIZE)], SIZE, record)
    assert rank.tier.commit_slot(slot, name, 2, record)
    rank.client.close()
    (successor,) = joined(bench, writer, world=1, generation=2)
    held = successor.tier.recall()
    assert held is not None
    assert (2, record.state) == (held.held.step, held.held.record.state)


def test_limit_that_is_too_small_for_the_tier_is_told(bench: Bench) -> None:
    """Three slots for each of two workers are more than the limit: an error with figures and a remedy."""
    (first, _) = joined(bench, bench.writer(staging_limit=50_000), size=10_000)
    first.tier.reserve(10_000)
    with pytest.raises(
        StagingLimitError,
        match=r"staging_limit is too small: 172032 bytes are needed .* 3 times, 50000 are allowed",
    ):
        first.tier.next_slot(20)


def test_nothing_is_left_when_everything_is_killed(tmp_path: Path, real_processes: None) -> None:
    """SIGKILL of parent, writer and worker: no process, and nothing where shared memory has names."""
    code = (
        "import sys, time\n"
        "from elasticflow.snapshots.client.writer_process import start_writer\n"
        "from elasticflow.snapshots.client.writer_process import WriterStart\n"
        "from elasticflow.snapshots.client.staging import StagingClient\n"
        "from elasticflow.snapshots.format.shard_file import TensorEntry\n"
        "from elasticflow.snapshots.client.memory_tier import MemoryTierClient\n"
        f"w = start_writer(WriterStart({str(tmp_path)!r}, 'r'))\n"
        "c = StagingClient.connect(w.address, rank=0, world_size=1, local_world_size=1, generation=1)\n"
        "h = MemoryTierClient(c, 1)\n"
        "h.reserve(50_000_000)\n"
        "s = h.next_slot()\n"
        "print(w.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    writer = int(parent.stdout.readline())
    memory = staging_files(writer)
    assert len(memory) == 3
    os.kill(writer, signal.SIGKILL)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and users_of(memory):
        time.sleep(0.02)
    assert [] == users_of(memory)
    assert [] == list(Path("/dev/shm").glob("*elasticflow*"))
    assert [] == list(tmp_path.iterdir())


def staging_files(pid: int) -> set[int]:
    """Return the inodes of the memory files that a process holds."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in this moment
            if "elasticflow-staging" in str(entry.readlink()):
                found.add(entry.stat().st_ino)
    return found


def users_of(memory: set[int]) -> list[int]:
    """Return the processes that have any of these memory files open or mapped."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text()
            mapped = {int(line.split()[4]) for line in maps.splitlines() if "elasticflow-staging" in line}
            if memory & (mapped | staging_files(int(folder.name))):
                found.append(int(folder.name))
    return found


def optional(ranks: list[Rank]) -> list[Rank]:
    """Have each rank ask for slots that it can do without."""
    for rank in ranks:
        rank.tier = MemoryTierClient(rank.client, rank.generation, is_optional=True)
    return settled(ranks)


def test_flipped_bit_in_a_held_state_is_noticed_by_successors(bench: Bench) -> None:
    """One bit of rank 1's shard flips after it was held: the rank that looks at it names it, and no launch's end commits it."""
    writer = bench.writer()
    first = settled(joined(bench, writer))
    slots = [rank.hold(3) for rank in first]
    slots[1].memory[500] ^= 4
    die(first)
    second = joined(bench, writer, generation=2)
    held = [rank.tier.recall() for rank in second]
    assert all(each is not None for each in held)
    assert [None, 1] == [each.damaged(part, 2) for part, each in enumerate(held) if each is not None]
    die(second)
    writer.finish(20)
    assert [] == bench.catalog.committed()


def test_every_flipped_bit_and_exchanged_parts_change_the_digest() -> None:
    """Of a content with a rest behind its last whole part: each bit of some bytes everywhere, and two parts exchanged."""
    content = bytearray(range(256)) * 40 + bytearray(b"rest of it")
    whole = digest_of(memoryview(content), len(content))
    for place in (0, 7, 511, 512, 5000, len(content) - 600, len(content) - 1):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert digest_of(memoryview(content), len(content)) != whole
            content[place] ^= 1 << bit
    assert digest_of(memoryview(content), len(content)) == whole
    length = len(content) // 8 // 64 * 8
    exchanged = content[length : 2 * length] + content[:length] + content[2 * length :]
    assert exchanged != content
    assert digest_of(memoryview(exchanged), len(content)) != whole


def test_optional_tier_has_two_slots_and_fills_none_that_is_being_written(bench: Bench) -> None:
    """The writer stops with a set in its hands: one more state is held, and then none until that set is written."""
    writer = bench.writer()
    (rank,) = optional(joined(bench, writer, world=1, size=50_000_000))
    rank.tier.await_answer()
    assert 2 == len(rank.client.slots) == len(staging_files(writer.process.pid))
    rank.hold(1)
    rank.client.request_persist(1, "steps")
    rank.client.await_begun()
    writer.process.send_signal(signal.SIGSTOP)
    is_written = rank.tier.is_free
    if not is_written:
        rank.hold(2)
        assert not rank.tier.is_free
        with pytest.raises(SnapshotError, match="no slot of the memory tier is free in time"):
            rank.tier.next_slot(0.05)
    writer.process.send_signal(signal.SIGCONT)
    rank.hold(3)
    assert [("snapshot.committed", 1)] == bench.outcomes(rank.client.flush(20))
    rank.client.close()
    assert [content(3, 1, 50_000_000)] == recalled(joined(bench, writer, world=1, generation=2))


def slow_store(bench: Bench, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[WriterProcess, Rank]:
    """Return a writer that takes some seconds to write its first snapshot, and a rank of which it is writing step 1 for long."""
    with monkeypatch.context() as patched:
        patched.setenv(fault_injection.VARIABLE, "shares.mid_write=stall:4@1")
        writer = bench.writer(**config)
    (rank,) = optional(joined(bench, writer, world=1, size=100_000))
    rank.hold(1)
    rank.client.request_persist(1, "steps")
    rank.client.await_begun()
    rank.hold(2)
    assert not rank.tier.is_free
    for now in (100.0, 100.9):
        assert rank.tier.ask_for_another(now) is None
        rank.client.receive_waiting()
    assert 2 == len(staging_files(writer.process.pid)), "it does not last yet"
    return writer, rank


def with_third_slot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[WriterProcess, Rank]:
    """Return what `slow_store` does, once the rank has another slot."""
    writer, rank = slow_store(bench, monkeypatch)
    rank.tier.ask_for_another(101.1)
    while not rank.tier.is_free:
        time.sleep(0.01)
    return writer, rank


def test_optional_tier_has_a_third_slot_while_a_snapshot_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are held meanwhile, and the third slot's memory is given back afterwards, by both processes."""
    writer, rank = with_third_slot(bench, monkeypatch)
    memory = staging_files(writer.process.pid)
    assert 3 == len(memory)
    for step in (3, 4, 5):
        rank.hold(step)
    assert [] == bench.catalog.committed(), "the store is slow"
    assert [("snapshot.committed", 1)] == bench.outcomes(rank.client.flush(20))
    rank.hold(6)
    assert 2 == len(rank.client.slots)
    while len(left := staging_files(writer.process.pid)) == 3:
        time.sleep(0.01)
    (gone,) = memory - left
    assert [] == users_of({gone})
    rank.hold(7)
    rank.client.close()
    assert [content(7, 1, 100_000)] == recalled(joined(bench, writer, world=1, generation=2))
    (found,) = bench.catalog.committed()
    assert [] == verify.verify(bench.catalog, found)


def test_killed_while_a_snapshot_is_written_leaves_a_newer_state(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor takes three slots over, with the newest state, and gives one back with the first that it holds."""
    writer, rank = with_third_slot(bench, monkeypatch)
    rank.hold(3)
    rank.hold(4)
    rank.client.close()
    second = joined(bench, writer, world=1, generation=2, size=100_000)
    assert [content(4, 1, 100_000)] == recalled(second)
    (rank,) = optional(second)
    rank.tier.await_answer()
    assert 3 == len(rank.client.slots)
    rank.hold(5)
    assert 2 == len(rank.client.slots)


def test_optional_tier_without_memory_for_a_third_slot_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit has room for two: none is held until the snapshot is written, and then as before."""
    _, rank = slow_store(bench, monkeypatch, staging_limit=300_000)
    assert rank.tier.ask_for_another(101.1) is None
    while (reason := rank.tier.ask_for_another(102.0)) is None:
        rank.client.receive_waiting()
    assert "are needed to stage this node's part of a snapshot 3 times, 300000 are allowed" in reason
    assert not rank.tier.is_free
    with pytest.raises(SnapshotError, match="no slot of the memory tier is free in time"):
        rank.tier.next_slot(0.05)
    assert [("snapshot.committed", 1)] == bench.outcomes(rank.client.flush(20))
    assert rank.tier.is_free
    rank.hold(3)
    assert 2 == len(rank.client.slots)


def test_optional_tier_is_declined_where_the_limit_is_too_small(bench: Bench) -> None:
    """No error: the reason, and staging buffers as without a tier; the ranks that had slots give them back."""
    ranks = optional(joined(bench, bench.writer(staging_limit=50_000), size=10_000))
    for rank in ranks:
        rank.tier.await_answer()
        assert "are needed to stage this node's part of a snapshot twice, 50000 are allowed" in str(
            rank.tier.declined
        )
        rank.tier.give_up()
    for rank in ranks:
        rank.client.buffer(10_000, 20)[:] = bytes(10_000)


def test_optional_tier_takes_half_of_the_free_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with room for all but a byte of it: the first rank is declined, and the second alike."""
    size, free = 1 << 16, 2 * 2 * 2 * (1 << 16)
    monkeypatch.setattr(memory, "available", lambda: free)
    tier = MemoryTierSlots(memory.BufferPool())
    for rank in (0, 1):
        assert 2 == len(tier.attach(rank, 2, 1, size, None, is_optional=True).slots)
    free -= 1
    tier = MemoryTierSlots(memory.BufferPool())
    for rank in (0, 1):
        with pytest.raises(OSError, match="half of the free memory"):
            tier.attach(rank, 2, 1, size, None, is_optional=True)


def test_slots_of_a_worker_that_got_no_larger_ones_are_given_to_one_rank_only() -> None:
    """It leaves after its slots were given back: two ranks would fill the same memory."""
    tier = MemoryTierSlots(memory.BufferPool(limit=8 << 20))
    first = tier.attach(0, 1, 1, 1 << 20, None)
    with pytest.raises(memory.LimitError):
        tier.attach(0, 1, 1, 4 << 20, first)
    tier.detach(first)
    numbers = [slot.number for rank in (0, 1) for slot in tier.attach(rank, 2, 2, 1 << 20, None).slots]
    assert len(numbers) == len(set(numbers))


def test_memory_that_is_still_looked_at_is_no_hindrance_to_a_larger_buffer() -> None:
    """The thread that has written a buffer may let go of it a moment after it is free again."""
    pool = memory.BufferPool()
    small = pool.take(1)
    look = memoryview(small.memory)[:1]
    pool.disown(small)
    large = pool.take(2 * small.size)
    assert large.size > small.size
    look.release()
    pool.disown(large)


def test_third_slots_take_half_of_the_free_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that asks first measures for both; the next time there is a byte too little for both."""
    size, free = 1 << 16, 1 << 30
    monkeypatch.setattr(memory, "available", lambda: free)
    tier = MemoryTierSlots(memory.BufferPool())
    ranks = [tier.attach(rank, 2, 1, size, None, is_optional=True) for rank in (0, 1)]
    free = 2 * 2 * size
    for rank_slots in ranks:
        slot = tier.add(rank_slots)
        free -= size
        assert 3 == len(rank_slots.slots)
        tier.remove(rank_slots, slot.number)
        assert 2 == len(rank_slots.slots)
    free = 2 * 2 * size - 1
    tier._written = 1, 9
    for rank_slots in ranks:
        with pytest.raises(OSError, match="half of the free memory"):
            tier.add(rank_slots)
