"""Unusual and wrong ways to write a loop: each ends with the weights of the loop written well, or is refused by a sentence."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.conftest import Group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.forked import ForkedPrograms

HEAD = """\
import itertools
import json
import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticflow as ef
from tests.runtime.programs.loop_parts import *
"""
PASSES = """\
run, model, optimizer = begin()
for epoch in run.epochs(3):
    for batch in run.batches(Numbers(), size=8):
        loss = learn(model, optimizer, batch)
        run.step(loss=loss)
"""
WELL = f"{PASSES}run.finish()\n"
KILLED, INTERRUPTED, REFUSED = -9, 75, 1


@dataclass(frozen=True)
class Case:
    """A way to write a loop.

    Attributes:
        name: In the table.
        body: The script, behind HEAD.
        steps: It is right: the newest snapshot is of this step, and has the weights of the loop written well. Else:
        refused: A part of the sentence that every rank ends with.
        ranks: Of the group.
        code: Exit code where it is right.
        before: Exit codes of the starts before this one; `START` in the script counts them from 1.
        environment: Of the last start.
        says: A part of what the last start writes to standard error.
        like: The loop written well, undisturbed.
    """

    name: str
    body: str
    steps: int | None = None
    refused: str | None = None
    ranks: int = 1
    code: int = 0
    before: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    says: str = ""
    like: str = WELL


def right(name: str, body: str, steps: int = 15, **more: Any) -> Case:
    """Return a loop that is as right as the one written well."""
    return Case(name, textwrap.dedent(body), steps=steps, **more)


def survives(name: str, body: str, **more: Any) -> Case:
    """Return a loop that ends as if it had not been killed, by its `die()`, in the start before."""
    return right(name, body, before=(KILLED,), like=body.replace("die()", "pass"), **more)


def refused(name: str, sentence: str, body: str, **more: Any) -> Case:
    """Return a loop that is refused by *sentence*."""
    return Case(name, textwrap.dedent(body), refused=sentence, **more)


def loop_with(line: str) -> str:
    """Return a script with *line* at the end of each pass."""
    return f"""\
run, model, optimizer = begin()
for batch in run.batches(Numbers(), size=8, epochs=3):
    loss = learn(model, optimizer, batch)
    {line}
run.finish()
"""


MODELS = [
    right(
        "a snapshot that finds no room, in a loop that goes on",
        WELL,
        environment={"ELASTICFLOW_FAULTS": "shares.before_write=raise:ENOSPC@1"},
        says="could not be written: OSError: [Errno 28] No space left on device",
    ),
    right("the loop written well on two ranks", WELL, ranks=2),
    refused(
        "the model is not wrapped",
        "nothing exchanged their gradients",
        """
        run = ef.join(seed=7, threads=1)
        model = Counter()
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    refused(
        "the wrapped model is not the one that is called",
        "their gradients were not exchanged though the model is wrapped: the loop calls the bare model",
        """
        run = ef.join(seed=7, threads=1)
        model = Counter()
        run.wrap(model)
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    right(
        "DistributedDataParallel by hand",
        """
        run = ef.join(seed=7, threads=1, every="4 steps")
        model = Counter()
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        model = DistributedDataParallel(model)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    refused(
        "run.wrap and run.gradients",
        "run.wrap exchanges gradients, and so does run.gradients: they would be exchanged twice",
        "begin(virtual_shards=4)",
    ),
    refused(
        "frozen after run.wrap",
        "seen.seen was frozen after run.wrap was called, and DistributedDataParallel exchanges no gradient before it has that",
        """
        run = ef.join(seed=7, threads=1)
        model = nn.ModuleDict({"seen": Counter(), "more": Counter()})
        model.forward = lambda numbers: model["seen"](numbers).detach() + model["more"](numbers)
        wrapped = run.wrap(model)
        model["seen"].requires_grad_(False)
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(wrapped, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    refused(
        "wrapped twice",
        "run.wrap was given a model that DistributedDataParallel has wrapped already",
        """
        run = ef.join(seed=7, threads=1)
        run.wrap(run.wrap(Counter()))
        """,
        ranks=2,
    ),
    refused(
        "an option of DistributedDataParallel that is misspelt, on one rank",
        "run.wrap has no option find_unused",
        """
        run = ef.join(seed=7, threads=1)
        run.wrap(Counter(), find_unused=True)
        """,
    ),
    refused(
        "a sharded model that is wrapped as well",
        "seen is a DTensor",
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        run = ef.join(seed=7, threads=1)
        model = Counter()
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        torch.distributed.barrier()  # a rank that ended now would fail the other one, which may still be joining
        run.wrap(model)
        """,
        ranks=2,
    ),
]

EPOCHS = [
    refused(
        "a loop over epochs around run.batches",
        "run.batches was called a second time for the same data: its epochs are over after the first loop",
        """
        run, model, optimizer = begin()
        for epoch in range(3):
            for batch in run.batches(Numbers(), size=8, epochs=1):
                run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    refused(
        "a function for each epoch calls run.batches with epochs=1",
        "run.batches was called a second time for the same data",
        """
        run, model, optimizer = begin()
        def train():
            for batch in run.batches(Numbers(), size=8, epochs=1):
                run.step(loss=learn(model, optimizer, batch))
        train()
        train()
        """,
    ),
    right(
        "a function for each epoch of run.epochs",
        """
        run, model, optimizer = begin()
        def train(epoch):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
        for epoch in run.epochs(3):
            train(epoch)
        run.finish()
        """,
    ),
    right(
        "a new but equal dataset in each epoch",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            data = Numbers()
            for batch in run.batches(data, size=8):
                run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    refused(
        "an epoch without batches",
        "an epoch of run.epochs made no step",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            pass
        """,
    ),
    refused(
        "an epoch whose batches are never asked for",
        "an epoch of run.epochs made no step",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            run.batches(Numbers(), size=8)
        """,
    ),
    refused(
        "two loops over batches in one epoch",
        "run.batches was called a second time in one epoch of run.epochs",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for data in (Numbers(), Numbers(first=1)):
                for batch in run.batches(data, size=8):
                    run.step(loss=learn(model, optimizer, batch))
        """,
    ),
    refused(
        "another size in the second epoch",
        "run.batches was given size=4, epochs=3, tail=spill in this epoch, and size=8, epochs=3, tail=spill in the one before",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8 if epoch == 0 else 4):
                run.step(loss=learn(model, optimizer, batch))
        """,
    ),
    refused(
        "other data in the second epoch",
        "run.batches was given other data in this epoch than in the one before",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(first=epoch), size=8):
                run.step(loss=learn(model, optimizer, batch))
        """,
    ),
    refused(
        "run.epochs inside of run.epochs",
        "run.epochs was called inside of run.epochs",
        """
        run, model, optimizer = begin()
        for fold in run.epochs(2):
            for epoch in run.epochs(3):
                pass
        """,
    ),
    right(
        "a batch that grows from epoch to epoch",
        """
        run, model, optimizer = begin()
        for size in (8, 10, 8 * START):
            for batch in run.batches(Numbers(), size=size, epochs=1):
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 8:
                    die()
        run.finish()
        """,
        before=(KILLED,),
        steps=12,
        like="""
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=1):
            run.step(loss=learn(model, optimizer, batch))
        for batch in run.batches(Numbers(), size=10, epochs=1):
            run.step(loss=learn(model, optimizer, batch))
        for batch in run.batches(Numbers(), size=16, epochs=1):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    refused(
        "a number of epochs in run.epochs and in run.batches",
        "run.batches was given epochs inside of run.epochs, which says how many there are",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            run.batches(Numbers(), size=8, epochs=3)
        """,
    ),
    right(
        "own data inside of run.epochs",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for low in range(0, SAMPLES, 8):
                optimizer.zero_grad()
                loss = model(torch.arange(low, low + 8)).mean()
                loss.backward()
                optimizer.step()
                run.step(loss=loss, samples=8)
        run.finish()
        """,
        like="""
        run, model, optimizer = begin()
        for step in range(15):
            optimizer.zero_grad()
            loss = model(torch.arange(step % 5 * 8, step % 5 * 8 + 8)).mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss, samples=8)
        run.finish()
        """,
    ),
]

NOISY = """
run, model, optimizer = begin(every="1 epoch")
for epoch in run.epochs(3):
    for low in range(0, SAMPLES, 8):
        optimizer.zero_grad()
        noise = torch.rand(()) + torch.rand(()) * run.position.step
        loss = model(torch.arange(low, low + 8)).mean() * noise
        loss.backward()
        optimizer.step()
        run.step(loss=loss, samples=8)
        if START == 1 and run.position.step == 8:
            die()
run.finish()
"""

ADDED_UP = """
run = ef.join(seed=7, every="4 steps", threads=1{join})
model = Counter()
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer)
{wrapped}
for batch in run.batches(Numbers(), size=8, epochs=3):
    loss = {more}
    if batch.end.step % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
    run.step(loss=loss)
run.finish()
"""
MOODY = """
class Moody(Counter):
    def forward(self, numbers):
        return super().forward(numbers) * (2 if self.training else 1)
run, model, optimizer = begin(Moody())
model.eval()
for epoch in run.epochs(3):
    if epoch == 1:
        model.train()
    for batch in run.batches(Numbers(), size=8):
        run.step(loss=learn(model, optimizer, batch))
        if START == 1 and batch.end.step == 13:
            die()
run.finish()
"""
NOISY_STEPS = """
run, model, optimizer = begin()
for step in run.steps(15):
    optimizer.zero_grad()
    noise = torch.rand(()) + torch.rand(()) * step
    loss = model(torch.arange(8) + step % 5 * 8).mean() * noise
    loss.backward()
    optimizer.step()
    run.step(loss=loss, samples=8)
    if START == 1 and run.position.step == 8:
        die()
    torch.rand(())
assert run.is_finished
run.finish()
"""
STEPS_OF_RUN, COUNTED_STEPS = "for step in run.steps(15):", "while (step := run.position.step) < 15:"
TWO_FLAT_PHASES = """
run, model, optimizer = begin()
for batch in run.batches(Numbers(), size=8, epochs=2):
    if START == 1 and batch.end.step == 10: os.kill(os.getpid(), 15)
    run.step(loss=learn(model, optimizer, batch))
for batch in run.batches(Numbers(20, first=5), size=4, epochs=1):
    run.step(loss=learn(model, optimizer, batch))
assert run.is_finished == (START == 2)
run.finish()
"""
TWO_PHASES = """
run, model, optimizer = begin()
for epoch in run.epochs(2):
    for batch in run.batches(Numbers(), size=8):
        if START == 1 and batch.end.step == 10: os.kill(os.getpid(), 15)
        run.step(loss=learn(model, optimizer, batch))
for epoch in run.epochs(1):
    for batch in run.batches(Numbers(20, first=5), size=4):
        run.step(loss=learn(model, optimizer, batch))
assert run.is_finished == (START == 2)
run.finish()
"""
ASKED_EARLY = NOISY_STEPS.replace("die()", "pass").replace(
    "    run.step(", "    if START == 1 and step == 0: os.kill(os.getpid(), 15)\n    run.step("
)
BEHIND_KEEP = """
run, model, optimizer = begin()
model.load_state_dict({'seen': torch.ones(SAMPLES)})
model.seen.requires_grad_(False)
for step in run.steps(15):
    if step == 2:
        model.seen.requires_grad_(True)
    optimizer.zero_grad()
    loss = model(torch.arange(8) + step % 5 * 8).mean()
    if step >= 2:
        loss.backward()
        optimizer.step()
    run.step(loss=loss, samples=8)
    if START == 1 and run.position.step == 10:
        die()
run.finish()
"""
SAM = """
class Sam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=1.0, momentum=0.5)
    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()
run = ef.join(seed=7, every="4 steps", threads=1)
model = run.wrap(Counter())
optimizer = Sam(model.parameters())
run.keep(model=model, optimizer=optimizer, base=optimizer.base)
while (step := run.position.step) < 15:
    for move in (optimizer.first_step, optimizer.second_step):
        loss = (model(torch.arange(8) + step % 5 * 8) ** 2).mean() + model.seen.sum()
        loss.backward()
        move()
    run.step(loss=loss, samples=8)
    if START == 1 and run.position.step == 10:
        die()
run.finish()
"""
COUNTED_PASSES = """
while run.position.step < {end} and not run.should_leave:
    step = run.position.step
    noise = torch.rand(())
    model.seen.data.mul_(0.5 + noise)
    model.late.requires_grad_(step >= 4)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(8) + step % 5 * 8).mean() * noise
        loss.backward()
        optimizer.step()
    run.step(loss=loss, samples=8)
    if START == 1 and run.position.step == 6:
        die()
    torch.rand(())
"""
HEAD_OF_PASS = f"""
class Two(Counter):
    def __init__(self):
        super().__init__()
        self.late = nn.Parameter(torch.zeros(()))
    def forward(self, numbers):
        return super().forward(numbers) - self.late
run, model, optimizer = begin(Two())
{COUNTED_PASSES.format(end=2)}{COUNTED_PASSES.format(end=15)}assert run.is_finished
run.finish()
"""
BREAKS = """
run, model, optimizer = begin()
while run.position.step < 15:
    for step in run.steps(15):
        optimizer.zero_grad()
        loss = model(torch.arange(8) + step % 5 * 8).mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss, samples=8)
        if START == 1 and run.position.step == 10:
            die()
        if run.position.step % 4 == 0:
            break
run.finish()
"""
LOADER = """
class Loader:
    at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]
    def __iter__(self):
        while self.at < 15:
            self.at += 1
            yield self.at - 1
run = ef.join(seed=7, every="4 steps", threads=1)
model = run.wrap(Counter())
optimizer, loader = optimizer_of(model), Loader()
run.keep(model=model, optimizer=optimizer, loader=loader)
"""
STEPS_OF_LOADER = f"""{LOADER}
model.load_state_dict({{'seen': torch.ones(SAMPLES)}})
for step, low in zip(run.steps(15), loader):
    optimizer.zero_grad()
    loss = model(torch.arange(8) + low % 5 * 8).mean()
    loss.backward()
    optimizer.step()
    run.step(loss=loss, samples=8)
    if START == 1 and run.position.step == 10:
        die()
run.finish()
"""
EVALUATING = f"""{LOADER}
import signal
def loss_of(outputs, targets):
    if START == 1 and run.position.step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return outputs.mean()
for low in loader:
    run.evaluate(Numbers(), loss=loss_of, size=8)
    optimizer.zero_grad()
    loss = model(torch.arange(8) + low % 5 * 8).mean()
    loss.backward()
    optimizer.step()
    run.step(loss=loss, samples=8)
run.finish()
"""
FETCHING = EVALUATING.replace(
    "for low in loader:", "while loader.at < 15:\n    low = loader.fetch()"
).replace(
    "    def __iter__(self):", "    def fetch(self):\n        return next(self.all())\n    def all(self):"
)
FROZEN = """
class Scaled(Counter):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
    def forward(self, numbers):
        return super().forward(numbers) * self.scale
run = ef.join(seed=7, every="4 steps", threads=1)
model = Scaled()
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer)
replicas = run.wrap(model, find_unused_parameters=True)
for batch in run.batches(Numbers(), size=8, epochs=3):
    model.scale.requires_grad_(run.position.step >= 7)
    loss = learn(replicas, optimizer, batch)
    run.step(loss=loss)
    if START == 1 and run.position.step == 6:
        die()
run.finish()
"""
COUNTING = """
import signal
def loss_of(outputs, targets):
    if START == 1 and run.position.step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return outputs.mean()
run = ef.join(seed=7, every="4 steps", threads=1)
model = run.wrap(Counter())
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer, passes=0)
for batch in run.batches(Numbers(), size=8, epochs=3):
    run.kept["passes"] += 1
    run.evaluate(Numbers(), loss=loss_of, size=8)
    run.step(loss=learn(model, optimizer, batch))
assert run.should_leave or run.kept["passes"] == 15
run.finish()
"""
DRAWING = """
run = ef.join(seed=7, every="4 steps", threads=1)
{seeding}
model = run.wrap(Counter())
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer)
for step in run.steps(4):
    drawn = torch.randint(1000, (8,)), torch.from_numpy(np.random.randint(1000, size=8))
    ranks = [[torch.zeros_like(each) for _ in range(2)] for each in drawn]
    for each, of_ranks in zip(drawn, ranks):
        torch.distributed.all_gather(of_ranks, each)
    assert [bool((of[0] == of[1]).all()) for of in ranks] == [{torch_alike}, True]
    optimizer.zero_grad()
    loss = model(torch.arange(8) + step * 8).mean() + drawn[0].sum()
    loss.backward()
    optimizer.step()
    run.step(loss=loss, samples=8)
run.finish()
"""
DRAWN_LIKE = """
run, model, optimizer = begin()
for step in run.steps(4):
    optimizer.zero_grad()
    loss = model(torch.arange(8) + step * 8).mean()
    loss.backward()
    optimizer.step()
    run.step(loss=loss, samples=8)
run.finish()
"""

COUNTED = [
    right(
        "a batch's number in its epoch, over a kill",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                assert batch.number == (batch.end.step - 1) % 5
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 7:
                    die()
        run.finish()
        """,
        before=(KILLED,),
    ),
    right(
        "batches counted by enumerate",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for number, batch in enumerate(run.batches(Numbers(), size=8)):
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 7:
                    die()
        run.finish()
        """,
        says="begins to count again, and this is batch",
        before=(KILLED,),
    ),
    survives("draws of a loop over its own data, over a kill", NOISY),
    survives("draws of a loop over run.steps, over a kill", NOISY_STEPS),
    survives("weights loaded, and trained again, behind keep in a loop over run.steps", BEHIND_KEEP),
    survives(
        "an optimizer around another one that notes weights before it moves, in a loop that counts its steps itself",
        SAM,
    ),
    survives(
        "weights changed, layers unfrozen and draws at the head of a pass of a loop that counts its steps itself",
        HEAD_OF_PASS,
    ),
    survives("a layer that is trained again after a kill, where wrap follows keep", FROZEN, ranks=2),
    refused(
        "weights loaded behind keep in a loop that counts its steps itself",
        "model/seen is not as in snapshot",
        BEHIND_KEEP.replace(STEPS_OF_RUN, COUNTED_STEPS).replace("model.seen.requires_grad_(False)", ""),
        before=(KILLED,),
    ),
    refused(
        "layers frozen behind keep, and trained later, in a loop that counts its steps itself",
        "requires_grad of seen is not as in snapshot",
        BEHIND_KEEP.replace(STEPS_OF_RUN, COUNTED_STEPS)
        .replace("model.load_state_dict({'seen': torch.ones(SAMPLES)})", "")
        .replace("loss.backward()", "loss.requires_grad and loss.backward()"),
        before=(KILLED,),
    ),
    refused(
        "weights loaded behind keep, and a kept loader",
        "model/seen was changed between run.keep and the loop",
        STEPS_OF_LOADER,
        before=(KILLED,),
    ),
    right(
        "a request to exit while a pass evaluates, after a kept loader has given its samples out",
        EVALUATING,
        before=(0,),
        like=EVALUATING.replace("START == 1", "False"),
    ),
    right(
        "a request to exit while a pass evaluates, after a kept object that is no iterable has given its samples out",
        FETCHING,
        before=(0,),
        like=EVALUATING.replace("START == 1", "False"),
    ),
    right(
        "a request to exit while a pass evaluates, after a kept value has counted it",
        COUNTING,
        before=(0,),
    ),
    right(
        "draws of a loop that counts its steps by a variable, over a kill",
        """
        run, model, optimizer = begin()
        step = run.position.step
        while step < 15:
            low, unused = step % 5 * 8, torch.rand(())
            optimizer.zero_grad()
            loss = model(torch.arange(low, low + 8)).mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss, samples=8)
            step += 1
            if START == 1 and run.position.step == 8:
                die()
        run.finish()
        """,
        says="the first pass after this restart drew the random numbers of the run's first pass",
        before=(KILLED,),
        like=NOISY_STEPS.replace("die()", "pass").replace("* noise", ""),
    ),
    right(
        "own data, read by loader processes that outlive an epoch",
        """
        run, model, optimizer = begin()
        loader = torch.utils.data.DataLoader(range(40), 8, num_workers=1, persistent_workers=True)
        for epoch in run.epochs(3):
            for numbers in loader:
                optimizer.zero_grad()
                loss = model(numbers).mean()
                loss.backward()
                optimizer.step()
                run.step(loss=loss, samples=8)
        run.finish()
        """,
        says="a DataLoader has persistent_workers, whose random generators continue from epoch to epoch",
        like=NOISY_STEPS.replace("die()", "pass").replace("* noise", ""),
    ),
    right(
        "a sampler that is kept, and read ahead by the processes of a loader",
        """
        class Order(torch.utils.data.RandomSampler):
            read = 0
            def __iter__(self):
                for index in super().__iter__():
                    self.read += 1
                    yield index
            def state_dict(self):
                return {"read": self.read}
            def load_state_dict(self, state):
                self.read = state["read"]

        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        order = Order(range(40))
        loader = torch.utils.data.DataLoader(range(40), 8, sampler=order, num_workers=1)
        run.keep(model=model, optimizer=optimizer, order=order)
        for numbers in loader:
            optimizer.zero_grad()
            model(numbers).mean().backward()
            optimizer.step()
            run.step(samples=8)
        run.finish()
        """,
        5,
        says="order is kept, and a DataLoader with num_workers=1 reads it ahead of the steps",
        like="""
        run, model, optimizer = begin()
        for epoch in run.epochs(1):
            for numbers in torch.utils.data.DataLoader(range(40), 8, shuffle=True):
                optimizer.zero_grad()
                model(numbers).mean().backward()
                optimizer.step()
                run.step(samples=8)
        run.finish()
        """,
    ),
    right(
        "own data, and each rank seeds torch for itself",
        DRAWING.format(seeding="torch.manual_seed(7 + run.rank)", torch_alike=False),
        steps=4,
        ranks=2,
        like=DRAWN_LIKE,
    ),
    right(
        "own data, and all ranks draw alike",
        DRAWING.format(seeding="torch.manual_seed(7)", torch_alike=True),
        steps=4,
        ranks=2,
        says="all of them learn from the same samples",
        like=DRAWN_LIKE,
    ),
    right(
        "best weights that are kept, over a kill",
        """
        import copy
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer, best=None)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
            if batch.end.step == 4:
                run.kept["best"] = copy.deepcopy(model.state_dict())
            if START == 1 and batch.end.step == 10:
                die()
        assert run.position.step == 15
        model.load_state_dict(run.kept["best"])
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = learn(model, optimizer, batch)
            if batch.end.step == 4:
                best = model.seen.detach().clone()
            if batch.end.step == 15:
                model.load_state_dict({"seen": best})
            run.step(loss=loss)
        run.finish()
        """,
    ),
    right(
        "best weights that are loaded behind a loop whose last step has a snapshot",
        """
        run, model, optimizer = begin(every="5 steps")
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
        model.load_state_dict({"seen": torch.zeros_like(model.seen)})
        run.finish()
        """,
        says="the snapshot after step 15 was taken when the loop ended, and the script has changed seen since",
    ),
    right(
        "a buffer that an evaluation behind the loop makes in inference mode",
        """
        run, model, optimizer = begin(every="5 steps")
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
        with torch.inference_mode():
            model.register_buffer("cache", torch.zeros(2), persistent=False)
        run.finish()
        """,
    ),
    right(
        "a gradient scaler that is switched off, over a kill",
        """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer, scaler=scaler)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            optimizer.zero_grad()
            loss = model(batch.inputs).mean()
            scaler.scale(loss * batch.share).backward()
            scaler.step(optimizer)
            scaler.update()
            run.step(loss=loss)
            if START == 1 and batch.end.step == 7:
                die()
        run.finish()
        """,
        before=(KILLED,),
    ),
    survives("modules that begin to train halfway, over a kill", MOODY),
    refused(
        "a pass of run.steps without run.step",
        "run.step was not called in step 1",
        """
        run, model, optimizer = begin()
        for step in run.steps(3):
            pass
        """,
    ),
    survives("a loop over steps that is left every fourth step, and begun again", BREAKS),
    refused(
        "a second loop over as many steps of the run",
        "run.steps(15) counts the steps of the whole run, and earlier loops have made 15: no step is left",
        NOISY_STEPS.replace("assert run.is_finished", "for step in run.steps(15): pass"),
        before=(KILLED,),
    ),
    right(
        "a request to exit in the first pass over data of its own",
        ASKED_EARLY,
        before=(0,),
        like=NOISY_STEPS.replace("die()", "pass"),
    ),
    refused(
        "run.batches inside of run.steps",
        "run.batches was called inside of run.steps, which is for data that the script reads itself",
        """
        run, model, optimizer = begin()
        for step in run.steps(3):
            for batch in run.batches(Numbers(), size=8, epochs=1):
                run.step(loss=learn(model, optimizer, batch))
        """,
    ),
]

LEAVING = [
    right(
        "break at the end of a pass",
        loop_with("run.step(loss=loss)\n    if batch.end.step == 7: break"),
        7,
        says="finished after step 7 (the script left its loop after step 7 of 15)",
        ranks=2,
    ),
    right(
        "break, and a second start",
        loop_with("run.step(loss=loss)\n    if batch.end.step == 7: break"),
        7,
        before=(0,),
        says="had finished after step 7",
    ),
    right(
        "break at the top of a pass",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            if batch.end.step == 7:
                break
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        6,
        says="finished after step 6",
    ),
    refused(
        "break between optimizer.step and run.step",
        "step 7 was begun and not finished: the optimizer moved, and run.step was not called",
        loop_with("if batch.end.step == 7: break\n    run.step(loss=loss)"),
        ranks=2,
    ),
    refused(
        "break between forward and optimizer.step of a model with BatchNorm",
        "step 7 was begun and not finished: the model's buffers changed, as BatchNorm's do in a forward pass",
        """
        run = ef.join(seed=7, threads=1)
        model = run.wrap(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            optimizer.zero_grad()
            loss = model(batch.targets[:, None].float()).mean()
            if batch.end.step == 7:
                break
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
        run.finish()
        """,
    ),
    right(
        "an exception before optimizer.step is caught",
        """
        run, model, optimizer = begin()
        try:
            for batch in run.batches(Numbers(), size=8, epochs=3):
                if batch.end.step == 7:
                    raise ValueError("enough")
                run.step(loss=learn(model, optimizer, batch))
        except ValueError:
            pass
        run.finish()
        """,
        6,
    ),
    refused(
        "an exception behind optimizer.step is caught",
        "step 7 was begun and not finished: the optimizer moved",
        """
        run, model, optimizer = begin()
        try:
            for batch in run.batches(Numbers(), size=8, epochs=3):
                loss = learn(model, optimizer, batch)
                if batch.end.step == 7:
                    raise ValueError("enough")
                run.step(loss=loss)
        except ValueError:
            pass
        run.finish()
        """,
    ),
    refused(
        "an exception behind optimizer.step is caught inside the loop",
        "run.step was not called in step 7",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            try:
                loss = learn(model, optimizer, batch)
                if batch.end.step == 7:
                    raise ValueError("enough")
                run.step(loss=loss)
            except ValueError:
                pass
        """,
    ),
    refused(
        "a refusal of run.step is caught inside the loop, and comes only once",
        "rng, a numpy.random",
        """
        run, model, optimizer = begin()
        rng = np.random.default_rng(1)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = learn(model, optimizer, batch)
            if batch.end.step == 2:
                rng.random()
            try:
                run.step(loss=loss)
            except Exception:
                continue
        run.finish()
        """,
    ),
    right(
        "return in the middle of a function",
        """
        run, model, optimizer = begin()
        def train():
            for batch in run.batches(Numbers(), size=8, epochs=3):
                run.step(loss=learn(model, optimizer, batch))
                if batch.end.step == 7:
                    return
        train()
        run.finish()
        """,
        7,
    ),
    right(
        "islice",
        """
        run, model, optimizer = begin()
        for batch in itertools.islice(run.batches(Numbers(), size=8, epochs=3), 7):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        7,
    ),
    right(
        "enumerate and break",
        """
        run, model, optimizer = begin()
        for number, batch in enumerate(run.batches(Numbers(), size=8, epochs=3)):
            run.step(loss=learn(model, optimizer, batch))
            if number == 6:
                break
        run.finish()
        """,
        7,
    ),
    right(
        "zip with another loader",
        """
        run, model, optimizer = begin()
        for batch, other in zip(run.batches(Numbers(), size=8, epochs=3), itertools.count()):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "zip with a shorter loader in front",
        """
        run, model, optimizer = begin()
        for other, batch in zip(range(7), run.batches(Numbers(), size=8, epochs=3)):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        7,
    ),
    right(
        "a generator of the script around run.batches",
        """
        run, model, optimizer = begin()
        def loader():
            for batch in run.batches(Numbers(), size=8, epochs=3):
                yield batch
        for batch in loader():
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "next until StopIteration",
        """
        run, model, optimizer = begin()
        it = iter(run.batches(Numbers(), size=8, epochs=3))
        while True:
            try:
                batch = next(it)
            except StopIteration:
                break
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "next as often as there are steps",
        """
        run, model, optimizer = begin()
        it = iter(run.batches(Numbers(), size=8, epochs=3))
        for _ in range(15):
            run.step(loss=learn(model, optimizer, next(it)))
        run.finish()
        """,
    ),
    refused(
        "next less often than there are steps",
        "run.finish was called in the middle of the loop over run.batches, after step 7",
        """
        run, model, optimizer = begin()
        it = iter(run.batches(Numbers(), size=8, epochs=3))
        for _ in range(7):
            run.step(loss=learn(model, optimizer, next(it)))
        run.finish()
        """,
    ),
    refused(
        "all batches in a list",
        "run.step was not called in step 1",
        """
        run, model, optimizer = begin()
        batches = list(run.batches(Numbers(), size=8, epochs=3))
        """,
    ),
    refused(
        "a second loop over the same batches",
        "a second loop over the same run.batches(...): its batches come once",
        """
        run, model, optimizer = begin()
        batches = run.batches(Numbers(), size=8, epochs=3)
        for epoch in range(2):
            for batch in batches:
                run.step(loss=learn(model, optimizer, batch))
        """,
    ),
    refused(
        "break out of an epoch's batches",
        "the loop over an epoch's batches was left after step 3, before the epoch's end",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
                if batch.end.step == 3:
                    break
        """,
    ),
    refused(
        "break out of run.epochs by what each rank measures",
        "rank 0 continues after step 5, and rank 1 left its loop after step 5",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
            if epoch + run.rank == 1:
                break
        run.finish()
        """,
        ranks=2,
    ),
    right(
        "break out of run.epochs",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
            if epoch == 1:
                break
        run.finish()
        """,
        10,
        says="finished after step 10",
    ),
    refused(
        "run.batches in a loop over batches",
        "run.batches was called again in the middle of a loop over batches, after step 1",
        loop_with("run.step(loss=loss)\n    run.batches(Numbers(30), size=8, epochs=1)"),
    ),
    refused(
        "run.batches after run.steps",
        "run.batches was called after 15 steps over data that the script reads itself",
        NOISY_STEPS.replace("die()", "pass").replace(
            "assert run.is_finished", "run.batches(Numbers(), size=8, epochs=1)"
        ),
    ),
    right(
        "run.batches after an epoch of the script's own data",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(1):
            for low in range(0, 40, 8):
                optimizer.zero_grad()
                loss = model(torch.arange(low, low + 8)).mean()
                loss.backward()
                optimizer.step()
                run.step(loss=loss, samples=8)
        for batch in run.batches(Numbers(), size=8, epochs=2):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        like="""
        run, model, optimizer = begin()
        for epoch in run.epochs(1):
            for low in range(0, 40, 8):
                optimizer.zero_grad()
                loss = model(torch.arange(low, low + 8)).mean()
                loss.backward()
                optimizer.step()
                run.step(loss=loss, samples=8)
        numbers = [batch.inputs for batch in run.batches(Numbers(), size=8, epochs=2) if not run.step(
            loss=learn(model, optimizer, batch))]
        assert sorted(torch.cat(numbers).tolist()) == sorted([*range(40)] * 2)
        run.finish()
        """,
    ),
    refused(
        "run.finish in finally, and an error after the loop",
        "no place to export to",
        f"""
try:
    {textwrap.indent(PASSES, "    ").strip()}
    raise ef.errors.StateError("no place to export to")
finally:
    run.finish()
""",
    ),
    right(
        "the whole run in an except",
        f"""
try:
    import no_such_module
except ImportError:
    {textwrap.indent(WELL, "    ").strip()}
""",
    ),
    *(
        refused(
            f"run.finish in finally, and an error in a loop over run.{loop.partition('(')[0]}",
            "a broken sample",
            f"""
            run, model, optimizer = begin()
            try:
                for each in run.{loop}:
                    raise ef.errors.StateError("a broken sample")
            finally:
                run.finish()
            """,
        )
        for loop in ("batches(Numbers(), size=8, epochs=3)", "steps(15)")
    ),
    refused(
        "run.finish in the loop",
        "run.finish was called in the middle of the loop over run.batches, after step 1",
        loop_with("run.step(loss=loss)\n    run.finish()"),
    ),
    right("run.finish is forgotten", PASSES, says="finished after step 15"),
    refused(
        "run.finish is forgotten, and the last snapshot cannot be written",
        "the last snapshot could not be written",
        PASSES.replace("begin()", 'begin(every="1000 steps")')
        + "open(os.environ['ELASTICFLOW_RUN_FOLDER'] + '/snapshots', 'w').close()\n",
    ),
    right(
        "run.finish is forgotten behind run.steps",
        NOISY_STEPS.replace("START == 1", "False").replace("* noise", "").replace("run.finish()", ""),
        like=NOISY_STEPS.replace("die()", "pass").replace("* noise", ""),
        says="finished after step 15",
    ),
    right(
        "run.finish on rank 0 only",
        f"{PASSES}if run.is_main:\n    run.finish()\n",
        says="finished after step 15",
        ranks=2,
    ),
]

STEPS = [
    refused(
        "run.step is forgotten",
        "run.step was not called in step 1",
        loop_with("pass"),
    ),
    refused(
        "continue leaves out run.step",
        "run.step was not called in step 7",
        loop_with("if batch.end.step == 7: continue\n    run.step(loss=loss)"),
    ),
    refused(
        "run.step twice",
        "run.step was called twice in one pass through the loop",
        loop_with("run.step(loss=loss)\n    run.step(loss=loss)"),
    ),
    refused(
        "optimizer.step behind run.step",
        "an optimizer moved after run.step of step 1, which has counted that pass without the update",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            optimizer.zero_grad()
            run.step(loss=backward(model, batch))
            optimizer.step()
        """,
    ),
    right(
        "gradients of two passes added up by run.gradients",
        ADDED_UP.format(
            join=", virtual_shards=4",
            wrapped="",
            more="run.gradients(lambda part: model(part.inputs).mean(), batch)",
        ),
        like=ADDED_UP.format(join="", wrapped="run.wrap(model)", more="backward(model, batch)"),
    ),
    right(
        "code behind run.step, over a kill",
        """
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler, average=average, best=0)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
            scheduler.step()
            average.update_parameters(model)
            if batch.end.step % 4 == 0:
                run.evaluate(Numbers(), loss=lambda outputs, targets: outputs.mean())
                run.kept["best"] += 1
            if START == 1 and batch.end.step == 10:
                die()
        assert (run.kept["best"], int(average.n_averaged)) == (3, 15)
        model.load_state_dict(average.module.state_dict())
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
        step = run.step
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = learn(model, optimizer, batch)
            average.update_parameters(model)
            scheduler.step()
            if batch.end.step == 15:
                model.load_state_dict(average.module.state_dict())
            run.step(loss=loss)
        run.finish()
        """,
    ),
    right(
        "code behind run.step, and a request to exit",
        """
        import signal
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer, seen=0)
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
            if START == 1 and batch.end.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            run.evaluate(Numbers(), loss=lambda outputs, targets: outputs.mean())
            run.kept["seen"] += 1
        assert not run.is_finished or run.kept["seen"] == 15
        run.finish()
        """,
        before=(0,),
        ranks=2,
    ),
    refused(
        "optimizer.step behind the loop",
        "an optimizer moved after run.step of step 15",
        f"{PASSES}optimizer.step()\nrun.finish()\n",
    ),
    right(
        "what is left of gradients that were added up is learned behind the loop",
        """
        run, model, optimizer = begin()
        optimizer.zero_grad()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = backward(model, batch)
            if batch.end.step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)
        optimizer.step()
        run.finish()
        """,
        before=(0,),
        like="""
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = backward(model, batch)
            if batch.end.step % 2 == 0 or batch.end.step == 15:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)
        run.finish()
        """,
    ),
    right("no loss", loop_with("run.step()")),
    refused(
        "own data without samples",
        "run.step does not know how many samples this step had",
        """
        run, model, optimizer = begin()
        run.step(loss=1.0)
        """,
    ),
    refused(
        "the optimizer moves on one rank only",
        "the optimizers moved on some ranks and not on others in one pass through the loop",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            optimizer.zero_grad()
            loss = backward(model, batch)
            if run.rank == 0 or batch.end.step < 6:
                optimizer.step()
            run.step(loss=loss)
        run.finish()
        """,
        ranks=2,
    ),
    right(
        "gradients added up, and a kill between",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = backward(model, batch)
            if batch.end.step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)
            if START == 1 and batch.end.step == 11:
                die()
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            loss = backward(model, batch)
            if batch.end.step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)
        run.finish()
        """,
    ),
]

RANKS = [
    refused(
        "size differs between ranks",
        "size is 9 on rank 1, and 8 on rank 0",
        "run, model, optimizer = begin()\nrun.batches(Numbers(), size=8 + run.rank, epochs=1)",
        ranks=2,
    ),
    refused(
        "run.epochs differs between ranks",
        "epochs is 3 on rank 1, and 2 on rank 0",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(2 + run.rank):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
        ranks=2,
    ),
    refused(
        "the seed differs between ranks",
        "seed is 8 on rank 1, and 7 on rank 0",
        "run, *_ = begin(seed=7 + int(os.environ['RANK']))\nrun.batches(Numbers(), size=8, epochs=1)",
        ranks=2,
    ),
    refused(
        "the data differ between ranks",
        "rank 1 opened other data for `train` than rank 0",
        "run, model, optimizer = begin()\nrun.batches(Numbers(first=run.rank), size=8, epochs=1)",
        ranks=2,
    ),
    refused(
        "batches, and no keep",
        "run.batches was called before run.keep",
        "next(ef.join(threads=1).batches(Numbers(), size=8, epochs=1))",
    ),
    refused(
        "a generator of the script that is not kept",
        "noise, a torch._C.Generator, changes with the steps, and no snapshot holds it",
        """
        run, model, optimizer = begin()
        noise = torch.Generator()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            torch.rand((), generator=noise)
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "a generator on which no step depends",
        """
        run, model, optimizer = begin(ignore=["noise"])
        noise = torch.Generator()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            torch.rand((), generator=noise)
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "batches before keep",
        """
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = Counter()
        optimizer = optimizer_of(model)
        batches = run.batches(Numbers(), size=8, epochs=3)
        run.keep(model=model, optimizer=optimizer)
        for batch in batches:
            run.step(loss=learn(model, optimizer, batch))
            if START == 1 and batch.end.step == 7:
                die()
        run.finish()
        """,
        before=(KILLED,),
    ),
]

BEFORE_KEEP = [
    ("join twice", "elasticflow.join was called a second time in this process", "ef.join()"),
    ("keep without a model", "run.keep was given none: no model called `model`", "run.keep()"),
    ("keep without an optimizer", "run.keep was given no optimizer", "run.keep(model=Counter())"),
    ("step before keep", "run.step was called before run.keep", "run.step(loss=1.0, samples=8)"),
    ("epochs before keep", "run.epochs was called before run.keep", "run.epochs(3)"),
    ("evaluate before keep", "run.evaluate was called before run.keep", "run.evaluate(Numbers())"),
    ("finish before keep", "run.finish was called before run.keep", "run.finish()"),
]
BEFORE_LOOP = [
    ("keep twice", "run.keep was called a second time", "run.keep(model=model, optimizer=optimizer)"),
    ("no epoch", "run.epochs(0): the number of epochs is a whole number from 1", "run.epochs(0)"),
    ("half an epoch", "run.epochs(1.5): the number of epochs is a whole number from 1", "run.epochs(1.5)"),
    ("a text of epochs", "run.epochs('3'): the number of epochs is a whole number from 1", "run.epochs('3')"),
    ("size=0", "run.batches(size=0): must be a whole number from 1", "run.batches(data, size=0, epochs=1)"),
    (
        "size=2.5",
        "run.batches(size=2.5): must be a whole number from 1",
        "run.batches(data, size=2.5, epochs=1)",
    ),
    (
        "size=None",
        "run.batches(size=None): must be a whole number from 1",
        "run.batches(data, size=None, epochs=1)",
    ),
    (
        "epochs=0",
        "run.batches(epochs=0): must be a whole number from 1",
        "run.batches(data, size=8, epochs=0)",
    ),
    (
        "neither epochs nor steps",
        "run.batches was given neither epochs nor steps",
        "run.batches(data, size=8)",
    ),
    (
        "both epochs and steps",
        "run.batches was given both epochs and steps",
        "run.batches(data, size=8, epochs=1, steps=5)",
    ),
    (
        "a tail that there is not",
        "run.batches(tail='spil'): must be one of spill, short, drop",
        "run.batches(data, size=8, epochs=1, tail='spil')",
    ),
    (
        "num_workers=-1",
        "run.batches(num_workers=-1): must be a whole number from 0",
        "run.batches(data, size=8, epochs=1, num_workers=-1)",
    ),
    (
        "micro_batch_size without run.gradients",
        "run.batches gives each rank its part of a batch as a whole",
        "run.batches(data, size=8, epochs=1, micro_batch_size=4)",
    ),
    (
        "a DataLoader",
        "run.batches was given a DataLoader, which makes batches itself",
        "run.batches(torch.utils.data.DataLoader(data, batch_size=8), size=8, epochs=1)",
    ),
    (
        "a generator in place of data",
        "run.batches was given a generator, which cannot be read by index",
        "run.batches((n for n in range(40)), size=8, epochs=1)",
    ),
    (
        "data without a length",
        "run.batches was given a WithoutLength, which has no length",
        "run.batches(WithoutLength(), size=8, epochs=1)",
    ),
    (
        "an iterable dataset",
        "run.batches was given a Endless, which cannot be read by index",
        "run.batches(Endless(), size=8, epochs=1)",
    ),
    (
        "no data",
        "run.batches was given a Numbers without samples",
        "run.batches(Numbers(0), size=8, epochs=1)",
    ),
    (
        "a class in place of data",
        "run.batches was given a type, which has no length",
        "run.batches(Numbers, size=8, epochs=1)",
    ),
    (
        "batches that are larger than the data",
        'the dataset has 40 samples, fewer than a global batch of 64, and tail = "drop" drops them all',
        "run.batches(data, size=64, epochs=1, tail='drop')",
    ),
]
IN_PASS = [
    (
        "a loss for each sample",
        "run.step was given float32 (8,) as loss",
        "run.step(loss=torch.zeros(8))",
    ),
    ("a loss that is a text", "run.step was given str as loss", "run.step(loss='0.5')"),
    ("a loss that is a list", "run.step was given list of 1: float, ... as loss", "run.step(loss=[0.5])"),
    (
        "a complex loss",
        "run.step was given complex64 () as loss, which is not one real number",
        "run.step(loss=torch.tensor(1j))",
    ),
    (
        "samples that are no number",
        "run.step(samples='8'): must be a whole number from 0",
        "run.step(samples='8')",
    ),
    ("samples below 0", "run.step(samples=-8): must be a whole number from 0", "run.step(samples=-8)"),
    (
        "run.log of a text",
        "run.log(phase=...) was given str, which is not one number",
        "run.log(phase='warm')",
    ),
    (
        "run.log of a vector",
        "run.log(acc=...) was given float32 (3,), which is not one number",
        "run.log(acc=torch.zeros(3))",
    ),
    (
        "run.log of a loss",
        "run.log(loss=...): the step's line has a field `loss` of its own",
        "run.log(loss=1.0)",
    ),
    (
        "run.log of a step",
        "run.log(step=...): the step's line has a field `step` of its own",
        "run.log(step=1)",
    ),
    ("parts of no sample", "batch.parts(0): a part has a whole number of samples", "list(batch.parts(0))"),
    (
        "parts of half a sample",
        "batch.parts(0.5): a part has a whole number of samples",
        "list(batch.parts(0.5))",
    ),
    (
        "run.gradients without being told how",
        "run.gradients needs virtual shards",
        "run.gradients(lambda part: 0.0, batch)",
    ),
]
CALLS = [*BEFORE_KEEP, *BEFORE_LOOP, *IN_PASS]
REFUSING = f"""\
told = {{}}
def refuse(calls):
    for name, _, call in calls:
        told[name] = refusal(call, globals())
run, data = ef.join(seed=7, every="4 steps", threads=1), Numbers()
refuse({BEFORE_KEEP!r})
model = run.wrap(Counter())
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer)
refuse({BEFORE_LOOP!r})
for batch in run.batches(data, size=8, epochs=3):
    loss = learn(model, optimizer, batch)
    if batch.end.step == 3:
        refuse({IN_PASS!r})
    run.step(loss=loss)
with open(os.path.join(os.path.dirname(__file__), "told.json"), "w") as file:
    json.dump(told, file)
run.finish()
"""
"""Makes all the calls that are refused in one run, which then continues and is right."""

STOP_AT_6 = """\
run, model, optimizer = begin()
for batch in run.batches(Numbers(), size=8, epochs=3):
    run.step(loss=learn(model, optimizer, batch))
    if batch.end.step == 6 and run.rank == run.world_size - 1:
        run.stop("good enough")
run.finish()
"""

STOPPING = [
    *(
        right(f"run.stop by the last of {ranks} ranks", STOP_AT_6, 8, ranks=ranks, says="(good enough)")
        for ranks in (1, 2, 3)
    ),
    right("run.stop, and a second start", STOP_AT_6, 8, before=(0,), says="nothing was left to train"),
    right(
        "run.stop, and a kill behind the loop",
        STOP_AT_6.replace("begin()", 'begin(every="8 steps")').replace(
            "run.finish()", "if START == 1: die()\nrun.finish()"
        ),
        8,
        before=(KILLED,),
        says="had finished after step 8",
    ),
    right(
        "run.stop, and a kill before it counts",
        STOP_AT_6.replace("begin()", 'begin(every="6 steps")').replace(
            "    run.step(", "    if START == 1 and batch.end.step == 7: die()\n    run.step("
        ),
        8,
        before=(KILLED,),
        says="(good enough)",
    ),
    right(
        "run.stop by one rank, and a request to exit before it counts",
        STOP_AT_6.replace("begin()", 'begin(every="7 steps")').replace(
            'run.stop("good enough")',
            'run.stop("good enough")\n        if START == 1: os.kill(os.getpid(), 15)',
        ),
        8,
        ranks=2,
        before=(0,),
        says="(good enough)",
    ),
    right(
        "run.stop behind an evaluation",
        """
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
            if batch.end.step == 6:
                measured = run.evaluate(Numbers(), loss=lambda outputs, targets: outputs.mean())
                run.stop("good enough")
        run.finish()
        """,
        6,
        ranks=2,
    ),
    right(
        "run.stop by one rank behind an epoch",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
            if epoch == 1 and run.is_main:
                run.stop("good enough")
        run.finish()
        """,
        10,
        ranks=2,
        says="(good enough)",
    ),
]

RESUMED = """\
run, model, optimizer = begin({join})
for batch in run.batches(Numbers(), {batches}):
    run.step(loss=learn(model, optimizer, batch))
    if START == 1 and batch.end.step == 7:
        die()
run.finish()
"""


def resumed(join: str = "", batches: str = "size=8, epochs=3") -> str:
    """Return a script that is killed in its first start."""
    return RESUMED.format(join=join, batches=batches)


EXACT = """\
run = ef.join(seed=7, every="4 steps", threads=1, virtual_shards={shards})
model = Counter()
optimizer = optimizer_of(model)
run.keep(model=model, optimizer=optimizer)
for batch in run.batches(Numbers(), size=8, epochs=3):
    optimizer.zero_grad()
    loss = run.gradients(lambda part: model(part.inputs).mean(), batch)
    optimizer.step()
    run.step(loss=loss)
    if START == 1 and batch.end.step == 7:
        die()
run.finish()
"""
OTHER_CODE = "sys.argv[0] and open(__file__, 'a').write('# changed\\n')\n"
ACCEPTED = {"ELASTICFLOW_ACCEPT_DRIFT": "1"}

SECOND_STARTS = [
    right("killed", resumed(), before=(KILLED,), says="continues after step 4, from snapshot"),
    refused(
        "another seed",
        "seed is 8, and was 7 when the snapshot was taken",
        resumed("seed=6 + START"),
        before=(KILLED,),
    ),
    refused(
        "another seed, though drift is accepted",
        "seed is 8, and was 7 when the snapshot was taken",
        resumed("seed=6 + START"),
        before=(KILLED,),
        environment=ACCEPTED,
    ),
    refused(
        "another size",
        "size is 10, and was 8 when the snapshot was taken",
        resumed(batches="size=6 + 2 * START, epochs=3"),
        before=(KILLED,),
    ),
    refused(
        "another size, where run.batches stands before run.keep",
        "size is 10, and was 8 when the snapshot was taken",
        """
        run = ef.join(seed=7, every="4 steps", threads=1)
        batches = run.batches(Numbers(), size=6 + 2 * START, epochs=3)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in batches:
            run.step(loss=learn(model, optimizer, batch))
            if START == 1 and batch.end.step == 6:
                die()
        run.finish()
        """,
        before=(KILLED,),
    ),
    refused(
        "another tail",
        "tail is short, and was spill when the snapshot was taken",
        resumed(batches="size=8, epochs=3, tail='spill' if START == 1 else 'short'"),
        before=(KILLED,),
    ),
    refused(
        "other data",
        "the data of `train` is not what the snapshot was trained on",
        resumed().replace("Numbers()", "Numbers(first=START)"),
        before=(KILLED,),
    ),
    refused(
        "another model",
        "the snapshot does not fit the job's model: it has no bias",
        resumed().replace("begin()", "begin(model=Counter() if START == 1 else nn.Linear(2, 1))"),
        before=(KILLED,),
    ),
    refused(
        "other virtual shards",
        "virtual_shards is 8, and was 4 when the snapshot was taken",
        EXACT.format(shards="4 * START"),
        before=(KILLED,),
    ),
    right(
        "other virtual shards, accepted",
        EXACT.format(shards="4 * START"),
        before=(KILLED,),
        environment=ACCEPTED,
    ),
    right("exact and killed", EXACT.format(shards="4"), before=(KILLED,)),
    refused(
        "other code in exact mode",
        "train.py is",
        f"{OTHER_CODE}{EXACT.format(shards='4')}",
        before=(KILLED,),
    ),
    right(
        "other code in exact mode, accepted",
        f"{OTHER_CODE}{EXACT.format(shards='4')}",
        before=(KILLED,),
        environment=ACCEPTED,
    ),
    right(
        "more epochs",
        resumed(batches="size=8, epochs=1 + START"),
        before=(KILLED,),
    ),
    right(
        "more epochs once it had finished",
        resumed(batches="size=8, epochs=1 + START").replace("die()", "pass"),
        before=(0,),
    ),
    right(
        "weights loaded behind keep",
        resumed().replace("begin()\n", "begin()\nmodel.load_state_dict({'seen': torch.ones(SAMPLES)})\n"),
        before=(KILLED,),
        like=WELL.replace("begin()\n", "begin()\nmodel.load_state_dict({'seen': torch.ones(SAMPLES)})\n"),
    ),
    right(
        "the rate set behind keep",
        resumed().replace("begin()\n", "begin()\noptimizer.param_groups[0]['lr'] = 0.5 * START\n"),
        before=(KILLED,),
        like=WELL.replace("begin()\n", "begin()\noptimizer.param_groups[0]['lr'] = 0.5\n"),
    ),
    right(
        "a schedule that moves at the top of an epoch",
        """
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in run.epochs(3):
            scheduler.step()
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 9:
                    die()
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in run.epochs(3):
            scheduler.step()
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
    right(
        "a schedule that moves at the end of an epoch",
        """
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                if START == 1 and batch.end.step == 6:
                    die()
                run.step(loss=learn(model, optimizer, batch))
            scheduler.step()
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run = ef.join(seed=7, every="4 steps", threads=1)
        model = run.wrap(Counter())
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in run.epochs(3):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
            scheduler.step()
        run.finish()
        """,
    ),
    right(
        "a request to exit in the last pass of a phase, in loops over epochs",
        TWO_PHASES,
        before=(0,),
        like=TWO_PHASES.replace("START == 1", "False").replace("START == 2", "True"),
    ),
    right(
        "a request to exit in the last pass of a phase",
        TWO_FLAT_PHASES,
        before=(0,),
        like=TWO_PHASES.replace("START == 1", "False").replace("START == 2", "True"),
    ),
    right(
        "two phases, and a kill in the second",
        """
        run, model, optimizer = begin()
        for epoch in run.epochs(2):
            for batch in run.batches(Numbers(), size=8):
                run.step(loss=learn(model, optimizer, batch))
        for epoch in run.epochs(1):
            for batch in run.batches(Numbers(20, first=5), size=4):
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 13:
                    die()
        run.finish()
        """,
        before=(KILLED,),
        like="""
        run, model, optimizer = begin()
        for batch in run.batches(Numbers(), size=8, epochs=2):
            run.step(loss=learn(model, optimizer, batch))
        for batch in run.batches(Numbers(20, first=5), size=4, epochs=1):
            run.step(loss=learn(model, optimizer, batch))
        run.finish()
        """,
    ),
]

CASES = [*MODELS, *EPOCHS, *COUNTED, *LEAVING, *STEPS, *RANKS, *STOPPING, *SECOND_STARTS]


class Loops:
    """Runs scripts, each in a folder of its own, and remembers the weights of those that are written well."""

    def __init__(self, folder: Path, forked: ForkedPrograms) -> None:
        self._folder, self._forked = folder, forked
        self._known: dict[str, list[torch.Tensor]] = {}
        self._groups: list[Group] = []

    def group(self, body: str) -> Group:
        """Return a group whose program is *body*."""
        folder = self._folder / str(len(self._groups))
        folder.mkdir()
        (folder / "train.py").write_text(HEAD + textwrap.dedent(body))
        self._groups.append(Group(folder / "run", self._forked, folder / "train.py"))
        return self._groups[-1]

    def weights_of(self, body: str) -> list[torch.Tensor]:
        """Return the weights of the loop *body* after each step, on one rank and undisturbed."""
        if body not in self._known:
            path = self._folder / f"{len(self._known)}.weights"
            assert self.group(f"note_steps({str(path)!r})\n{textwrap.dedent(body)}").run(1).codes == [0]
            self._known[body] = torch.load(path)
        return self._known[body]

    def close(self) -> None:
        """End what still runs."""
        for group in self._groups:
            group.kill()


@pytest.fixture(scope="module")
def loops(forked: ForkedPrograms, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loops]:
    """Yield what runs scripts."""
    made = Loops(tmp_path_factory.mktemp("loops"), forked)
    yield made
    made.close()


def ended(group: Group, case: Case) -> Any:
    """Run all starts of *case* and return how the last one ended."""
    for number, code in enumerate(case.before, start=1):
        group.environment = {"START": str(number)}
        assert group.run(case.ranks).codes == [code] * case.ranks
    group.environment = {"START": str(len(case.before) + 1), **case.environment}
    return group.run(case.ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_or_refused(loops: Loops, case: Case) -> None:
    """The newest snapshot has the weights of the loop written well; or every rank ends with the sentence."""
    group = loops.group(case.body)
    end = ended(group, case)
    assert case.says in end.errors[0]
    if case.refused is not None:
        assert end.codes == [REFUSED] * case.ranks
        for error in end.errors:
            [line] = [line for line in error.splitlines() if line.startswith("elasticflow.errors.")]
            assert case.refused in line
        return
    assert end.codes == [case.code] * case.ranks
    newest = group.newest()
    assert newest.manifest.step == case.steps
    torch.testing.assert_close(newest.tensors["model/seen"], loops.weights_of(case.like)[case.steps - 1])


@pytest.fixture(scope="module")
def told(loops: Loops) -> dict[str, str]:
    """Return how each call is refused, by its name; the run of them ends with the weights of the loop written well."""
    group = loops.group(REFUSING)
    assert group.run(1).codes == [0]
    torch.testing.assert_close(group.newest().tensors["model/seen"], loops.weights_of(WELL)[-1])
    found: dict[str, str] = json.loads((group.folder.path.parent / "told.json").read_text())
    return found


@pytest.mark.parametrize(("name", "sentence"), [call[:2] for call in CALLS], ids=[name for name, *_ in CALLS])
def test_a_call_is_refused_and_changes_nothing(told: dict[str, str], name: str, sentence: str) -> None:
    """What cannot be meant is refused at the call, and a script that catches it continues as if it had not been made."""
    assert sentence in told[name]


def test_an_epoch_has_its_snapshot_at_its_end(loops: Loops) -> None:
    """Not a step later, though gradients are left in the parameters until the next pass."""
    group = loops.group(WELL.replace("begin()", 'begin(every="1 epoch")'))
    assert group.run(1).codes == [0]
    assert [line["step"] for line in group.lines("snapshot.staged")] == [5, 10, 15]


def test_the_last_batch_of_each_epoch_says_so(loops: Loops, tmp_path: Path) -> None:
    """In a flat loop, too, and where a restart begins in the middle of an epoch."""
    ends = tmp_path / "ends"
    group = loops.group(
        f"""
        run, model, optimizer = begin(every="8 steps")
        for batch in run.batches(Numbers(), size=8, epochs=3):
            run.step(loss=learn(model, optimizer, batch))
            with open({str(ends)!r}, "a") as file:
                file.write(f"{{START}}: {{batch.end.step}}\\n" * batch.is_last_of_epoch)
            if START == 1 and batch.end.step == 9:
                die()
        run.finish()
        """
    )
    ended(group, Case("killed", "", before=(KILLED,)))
    assert ends.read_text().splitlines() == ["1: 5", "2: 10", "2: 15"]


def test_a_model_that_is_trained_behind_the_loop_is_not_told(loops: Loops) -> None:
    """A classifier of what the run's model has learned: no step depends on it."""
    group = loops.group(
        WELL.replace("run.finish()", "probe = nn.Linear(1, 1)\nof_probe = optimizer_of(probe)\nrun.finish()")
    )
    end = group.run(1)
    assert end.codes == [0]
    assert "no snapshot holds" not in end.errors[0]


def test_code_between_stages_draws_the_same_on_all_ranks_and_after_a_restart(
    loops: Loops, tmp_path: Path
) -> None:
    """As for new weights of the next fold, though passes draw by rank."""
    group = loops.group(
        f"""
        import random

        run, model, optimizer = begin()
        for first in (0, 1, 2):
            for batch in run.batches(Numbers(first=first), size=8, epochs=1):
                torch.rand(2), random.random(), np.random.rand()
                run.step(loss=learn(model, optimizer, batch))
                if START == 1 and batch.end.step == 12:
                    die()
            drawn = float(torch.rand(())), random.random(), np.random.rand()
            with open({str(tmp_path)!r} + f"/drawn-{{first}}", "a") as file:
                file.write(f"{{drawn}}\\n")
        run.finish()
        """
    )
    ended(group, Case("killed", "", ranks=2, before=(KILLED,)))
    drawn = [(tmp_path / f"drawn-{first}").read_text().splitlines() for first in range(3)]
    assert [len(each) for each in drawn] == [4, 4, 2]
    assert [len({*each}) for each in drawn] == [1, 1, 1]
