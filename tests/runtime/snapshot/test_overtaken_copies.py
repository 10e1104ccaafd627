"""Copies from a device while code of the job's own writes the copied tensors: no copy is used that is not one state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel

from elasticflow.runtime.snapshot import staging_copy
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, view_of
from elasticflow.runtime.snapshot.staging_copy import DeviceCopier
from elasticflow.runtime.state import codec, loading
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from tests.pretended_device import DEVICE, DeviceTensor, pretended
from tests.runtime.stored import bits, take_step
from tests.runtime.test_trajectory import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.snapshot.rank_shard import RankShard
    from elasticflow.runtime.state.state import Captured
    from tests.pretended_device import Pretence


@pytest.fixture(autouse=True, scope="module")
def _storable() -> Iterator[None]:
    """A tensor of the pretended device counts as a tensor that a snapshot can hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "refusal", lambda *_, **__: None)
        yield


class Copied:
    """A copy that was begun.

    Attributes:
        expected: Bits of each tensor where the copy was begun, in the order of the training stream.
        is_used: The copy was complete and right, as far as the copier could tell; None: not known yet.
    """

    def __init__(self, shard: RankShard) -> None:
        self.shard, self.target = shard, memoryview(bytearray(shard.nbytes))
        self.expected = {key: bits(_values(tensor)) for key, tensor in shard.tensors.items()}
        self.is_used: bool | None = None
        self.overtaken: str | None = None

    def settle(self, overtaken: str | None) -> None:
        """See `Copier.then`; what is used must be the state."""
        self.is_used, self.overtaken = overtaken is None, overtaken
        staged = {
            entry.key: bits(view_of(self.target, BY_NAME[entry.dtype], entry.shape, entry.offset))
            for entry in self.shard.entries
        }
        if self.is_used:
            assert staged == self.expected
        else:
            assert overtaken is not None
            assert staged[overtaken] != self.expected[overtaken]


class Job:
    """A job on the pretended device, one step in."""

    def __init__(self, device: Pretence, *, is_pinned: bool = True, kind: str = "AdamW") -> None:
        device.is_pinned = lambda _: True  # type: ignore[assignment,method-assign]
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(8, 40, max_norm=3.0), nn.Flatten(), nn.Linear(160, 40), nn.BatchNorm1d(40)
        ).to(DEVICE)
        self.inputs = torch.randint(0, 8, (3, 4)).to(DEVICE)
        make: Callable[..., Any] = AdamW if kind == "AdamW" else partial(SGD, momentum=0.9)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.state, self.planner = State(model=self.model, optimizer=self.optimizer), ShardPlanner(0, 1)
        self.copier = DeviceCopier(DEVICE, [self.optimizer])
        if is_pinned:
            self.copier._memory.of = lambda target: target  # type: ignore[method-assign]
        self.copies: list[Copied] = []
        self.waiting: list[Callable[[], None]] = []
        self.step()

    def captured(self) -> tuple[Captured, RankShard]:
        """Return the state and this rank's shard of it."""
        captured = self.state.capture()
        return captured, self.planner.shard_of(captured)

    def copy(self, *, waits: bool = False, is_told_late: bool = False) -> Copied:
        """Begin a copy."""
        self.tell()
        captured, shard = self.captured()
        copied = Copied(shard)
        self.copies.append(copied)
        self.copier.start(shard, copied.target, captured.stepped, waits=waits)
        self.waiting.append(partial(self.copier.then, copied.settle))
        if not is_told_late:
            self.tell()
        return copied

    def tell(self) -> None:
        """Have the copier call back for the last copy, as a comparison of replicas does a step later."""
        for tell in self.waiting:
            tell()
        self.waiting.clear()

    def advance(self, part: float) -> None:
        """Have the device do a part of what the copy's stream has left."""
        stream: Any = self.copier._stream
        stream.run_to(stream.done + int(part * (stream.submitted - stream.done)))

    def finish(self) -> None:
        """Wait for the copy."""
        self.tell()
        self.copier.finish()

    def step(self) -> None:
        """Take a step."""
        take_step(self.model, self.optimizer, self.inputs)

    def forward(self) -> None:
        """Run a forward, which writes the buffers of the normalisation, and the embedding if its rows are too long."""
        self.model(self.inputs)

    def stretch(self) -> None:
        """Write the embedding, so that the next forward writes it."""
        with torch.no_grad():
            self.model[0].weight.mul_(2.0)  # type: ignore[operator]

    def clamp(self) -> None:
        """Clamp all parameters, as a WGAN's loop does at its top."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.01, 0.01)

    def clamp_data(self) -> None:
        """Do the same in the older way, which counts no version."""
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    def perturb(self) -> None:
        """Move the parameters and back, as SAM's first step and as an averaged model during an evaluation do."""
        held = [parameter.detach().clone() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.5)
            self.forward()
            for parameter, old in zip(self.model.parameters(), held, strict=True):
                parameter.copy_(old)

    def replay(self) -> None:
        """Write parameters and optimizer as the replay of a graph does: no hook is called, and no version counted."""
        for tensor in self.captured()[1].tensors.values():
            if isinstance(tensor, DeviceTensor) and tensor.is_floating_point():
                tensor.on_host.mul_(0.75)


def _values(tensor: Tensor) -> Tensor:
    return tensor.on_host if isinstance(tensor, DeviceTensor) else tensor


@pytest.mark.e2e
@pytest.mark.parametrize("memory", [(), ("--memory", "1 step")], ids=["staged", "held in memory"])
def test_a_job_goes_on_after_an_overtaken_copy(groups: Callable[[str], Any], memory: tuple[str, ...]) -> None:
    """A tensor of rank 1 was written while it was copied: that step has no snapshot, a later step has, and no bit differs."""
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(2).codes == [0, 0]
    assert parts.run(2, "--every", "5 steps", "--overtaken-at", "5", *memory).codes == [0, 0]
    assert_same(whole.newest(), parts.newest())
    failed = parts.lines("snapshot.failed")
    overtaken = parts.lines("staging.overtaken", rank=1)
    if memory:
        assert failed == []
        assert [(line["step"], line["name"]) for line in overtaken] == [(5, "model/w")]
    else:
        assert overtaken == []
        reason = "model/w was written while it was copied, and not by its optimizer's step"
        assert [(line["step"], line["reason"]) for line in failed] == [(5, reason)]
    steps = [found.step for found in parts.catalog.committed()]
    assert 5 not in steps
    assert {6, 7, 8, 9} & {*steps}
    assert steps[0] == 13


@pytest.mark.e2e
def test_the_last_state_that_was_overtaken_in_memory_is_missed(groups: Callable[[str], Any]) -> None:
    """The snapshot of the last step was overtaken on rank 1: every rank ends with an error that names the tensor."""
    group = groups("run")
    ended = group.run(2, "--every", "13 steps", "--overtaken-at", "13", "--memory", "13 steps")
    assert 0 not in ended.codes
    assert all("model/w was written while it was copied" in error for error in ended.errors)
    assert group.catalog.committed() == []


@pytest.mark.e2e
def test_a_snapshot_waits_where_the_script_alone_knows_its_end(groups: Callable[..., Any]) -> None:
    """The loop reads its own data: each due snapshot may be its last, and no code behind the loop overtakes its copy."""
    group = groups("run", "own_loop.py")
    arguments = ("--own-data", "--samples", "40", "--every", "5 steps", "--overtaken")
    assert group.run(2, *arguments).codes == [0, 0]
    assert group.lines("snapshot.failed") == []
    assert [found.step for found in group.catalog.committed()] == [10, 5]


HARMLESS = ("step", "forward")
FOREIGN = ("stretch", "clamp", "clamp_data", "perturb", "replay")
ACTIONS = st.one_of(
    st.sampled_from(HARMLESS),
    st.sampled_from(FOREIGN),
    st.sampled_from(["poll", "finish", "tell", "copy", "copy", "copy that waits", "copy, told late"]),
    st.floats(0, 1),
)


def run(job: Job, program: list[str | float]) -> None:
    """Run *program* on *job*, and wait for the last copy."""
    for action in program:
        match action:
            case float():
                job.advance(action)
            case "poll":
                job.copier.poll()
            case "copy" | "copy that waits" | "copy, told late":
                job.copy(waits=action == "copy that waits", is_told_late=action == "copy, told late")
            case _:
                getattr(job, action)()
    job.finish()


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTIONS, max_size=25), st.booleans(), st.sampled_from(["AdamW", "SGD"]))
def test_what_is_used_is_the_state_after_its_step(program: list[Any], is_pinned: bool, kind: str) -> None:
    """Whatever the loop does and however late the device copies: a copy is the state where it was begun, or it is not used."""
    with pretended() as device:
        job = Job(device, is_pinned=is_pinned, kind=kind)
        run(job, program)
    used = [copied.is_used for copied in job.copies]
    assert None not in used
    assert used[:1] in ([], [True])
    # Once overtaken, no copy is overtaken any more.
    assert used.count(False) <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(ACTIONS.filter(lambda action: action not in FOREIGN), max_size=25))
def test_no_copy_is_lost_if_only_steps_write(program: list[Any]) -> None:
    """A forward's buffers and an optimizer's step are waited for: nothing is overtaken."""
    with pretended() as device:
        job = Job(device)
        run(job, program)
    assert all(copied.is_used for copied in job.copies)


@pytest.mark.parametrize("writes", ["clamp", "clamp_data", "replay"])
def test_a_write_before_the_step_costs_one_copy(writes: str) -> None:
    """The first copy waits; the second is overtaken, and a tensor is named; the device waits for the third at once."""
    with pretended() as device:
        job = Job(device)
        for _ in range(4):
            job.copy()
            getattr(job, writes)()
            job.finish()
            job.step()
        stepped = job.captured()[0].stepped
    assert [copied.is_used for copied in job.copies] == [True, False, True, True]
    assert job.copies[1].overtaken in stepped


def test_an_embedding_that_its_forward_writes_is_waited_for() -> None:
    """Its `max_norm` tells in advance: no copy is overtaken."""
    with pretended() as device:
        job = Job(device)
        for _ in range(3):
            job.stretch()
            job.copy()
            job.forward()
            job.finish()
        captured, _ = job.captured()
    assert all(copied.is_used for copied in job.copies)
    assert "model/0.weight" not in captured.stepped
    assert "model/2.weight" in captured.stepped


def test_a_copy_that_must_not_be_overtaken_is_not() -> None:
    """The device waits at once, whatever comes next."""
    with pretended() as device:
        job = Job(device)
        for _ in range(3):
            job.copy(waits=True)
            job.clamp_data()
            job.finish()
    assert all(copied.is_used for copied in job.copies)


def test_a_write_on_another_stream_is_found_where_training_waits_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream of the job's own waits for no copy: the copy has other sums than the device had, and is not used."""
    with pretended() as device:
        job = Job(device)
        stream: Any = job.copier._stream
        wait_stream = stream.wait_stream

        def write_meanwhile(other: Any) -> None:
            wait_stream(other)
            job.clamp_data()

        monkeypatch.setattr(stream, "wait_stream", write_meanwhile)
        job.copy(waits=True)
        job.finish()
        stepped = job.captured()[0].stepped
    assert [copied.is_used for copied in job.copies] == [False]
    assert job.copies[0].overtaken in stepped


def test_the_host_waits_for_nothing() -> None:
    """Neither where a copy begins nor while it runs."""
    with pretended() as device:
        job = Job(device)
        for _ in range(3):
            job.copy()
            job.finish()
        device.waits.clear()
        job.copy()
        job.copier.poll()
        assert device.waits == []
        assert job.copies[-1].is_used is None
        job.advance(1.0)
        job.finish()
        assert job.copies[-1].is_used


def test_a_copy_is_compared_beside_the_next_step() -> None:
    """The comparison begins when the device is through, without a word of the training thread, which does not wait."""
    with pretended() as device:
        job = Job(device)
        for _ in range(2):
            job.copy()
            job.finish()
        device.waits.clear()
        job.copy()
        settled = job.copier._settled
        assert settled is not None
        assert not settled.done()
        job.advance(1.0)
        assert settled.result(60) is None
        assert device.waits == []
        assert job.copies[-1].is_used is None
        job.copier.poll()
        assert job.copies[-1].is_used


def test_a_scalers_state_is_read_without_a_wait() -> None:
    """Its numbers stay on the device until the copy brings them; a scaler on the CPU, also unused, takes them over."""
    with pretended() as device:
        job = Job(device)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        # What the first `scale` makes.
        scaler._scale = torch.full((), 32.0, device=DEVICE)
        scaler._growth_tracker = torch.full((), 2, dtype=torch.int32, device=DEVICE)
        average = AveragedModel(job.model)
        job.state = State(model=job.model, optimizer=job.optimizer, scaler=scaler, ema=average)
        job.copy()
        job.finish()
        device.waits.clear()
        job.step()
        captured = job.state.capture()
        shard = job.planner.shard_of(captured)
        job.copy()
        assert device.waits == []
        job.finish()
        assert all(copied.is_used for copied in job.copies)
        stored = {key: _values(tensor).clone() for key, tensor in shard.tensors.items()}
    for is_used in (False, True):
        other = torch.amp.GradScaler("cpu", init_scale=4.0)
        if is_used:
            other.scale(torch.ones(1))
        loading.load(other, codec.Decoder(stored, {}, copies=True).decode(captured.tree["scaler"]))
        other.scale(torch.ones(1))
        assert other.state_dict() == {
            "scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2
        }  # fmt: skip


def test_without_the_comparison_a_torn_copy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of these tests finds what the comparison prevents."""
    monkeypatch.setattr(staging_copy._Comparison, "difference", lambda _: None)
    with pretended() as device:
        job = Job(device)
        job.copy()
        job.finish()
        job.copy()
        job.clamp_data()
        with pytest.raises(AssertionError):
            job.finish()


def test_the_copy_begins_after_the_work_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's stream waits for the training stream before it reads anything."""
    with pretended() as device:
        job = Job(device)
        seen: list[str] = []
        stream = job.copier._stream
        monkeypatch.setattr(
            stream, "wait_stream", lambda other: seen.append("waits" if other is device.main else "?")
        )
        monkeypatch.setattr(stream, "add", lambda *_, **__: seen.append("work"))
        job.copy(is_told_late=True)
    assert seen[0] == "waits"
    assert set(seen[1:]) == {"work"}
