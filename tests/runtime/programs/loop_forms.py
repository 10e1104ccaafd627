"""Nine forms of a training loop, on models that count their samples; the form comes from the command line.

`seen[i]` grows by 1 each time that sample i is learned from, at any number of ranks; the optimizer's `order` adds up the
numbers of the updates that had it. `mix` has momentum and dropout, so that its bits tell a run from any other.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, DistributedSampler

import elasticflow as ef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SAMPLES, SIZE, EPOCHS = 150, 16, 8  # 75 steps; some batches reach from one epoch into the next
PER_UPDATE = 3  # passes of an update, where gradients are added up
OVERFLOWS = (4, 29, 62)  # steps whose gradients are not finite
OWN_SAMPLES, OWN_SIZE = 144, 12  # parts for 1 to 4 ranks
FIRST, SECOND = range(100), range(50, 150)  # data of two phases
FIRST_EPOCHS, SECOND_EPOCHS = 4, 6
STOPS_AFTER = 4  # epochs, where training ends early


class Numbers:
    """Samples that are their own numbers."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.numbers[index], 0


class Counter(nn.Module):
    """The counts of the samples, and a layer."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.seen, self.mix, self.dropped = nn.Parameter(torch.zeros(SAMPLES)), nn.Linear(4, 4), dropped

    def forward(self, numbers: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the layer's features of each sample, and its loss."""
        if features is None:
            features = torch.sin(numbers[:, None] * torch.arange(1.0, 5.0))
        mixed = dropout(torch.tanh(self.mix(features)), self.dropped, self.training)
        return mixed, 0.01 * mixed.square().mean(1) - self.seen[numbers]


class Counting(torch.optim.Optimizer):
    """Counts in `seen`, and descends with momentum in the layer."""

    def __init__(self, model: Counter, size: int) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [model.seen], "size": size},
            {"params": [*model.mix.parameters()], "size": None},
        ]
        super().__init__(groups, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move once."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["order"] = torch.tensor(0.0), torch.zeros_like(weight)
                state["step"] += 1
                if group["size"] is None:
                    weight.sub_(state["order"].mul_(0.9).add_(weight.grad), alpha=group["lr"])
                else:
                    counted = -group["size"] * weight.grad
                    weight.add_(counted)
                    state["order"] += state["step"] * counted


class Tally:
    """An object of the script's own that is kept: what followed each epoch."""

    def __init__(self) -> None:
        self.epochs, self.drawn = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"epochs": self.epochs, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a count."""
        self.epochs, self.drawn = state["epochs"], state["drawn"]


parser = argparse.ArgumentParser()
parser.add_argument("form")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of each pass")
parser.add_argument(
    "--told", type=Path, help="folder for the steps that were made, and what each rank ended with"
)
parser.add_argument("--kill-at", type=int, help="rank 1 is killed in this step, once a snapshot is committed")
args = parser.parse_args()
if args.kill_at:
    # Which reads what is committed now.
    from tests.runtime.programs import dying

run = ef.join(seed=11, every="7 steps", threads=1, name="forms")
is_own, data = args.form == "own_data", Numbers(range(SAMPLES))
model = Counter(0.0 if is_own else 0.25)
optimizer = Counting(model, OWN_SIZE if is_own else SIZE)
scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
if args.form == "plateau":  # whose metric is never better: the rate is lowered each time
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.9, patience=0)
tally = Tally()
more: dict[str, Any] = {}
if args.form == "gan":
    critic = Counter(0.25)
    critic_optimizer = Counting(critic, SIZE)
    more = {"critic": critic, "critic_optimizer": critic_optimizer}
if args.form == "scaler":
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    more = {"scaler": scaler}
wrapped = run.wrap(model)
run.keep(model=model, optimizer=optimizer, scheduler=scheduler, tally=tally, **more)


def loss_of(batch: Any) -> Tensor:
    """Return the loss of a batch; a short one counts its samples as a whole one does."""
    disturb()
    loss: Tensor = wrapped(batch.inputs)[1].mean() * batch.total / SIZE
    return loss


def disturb() -> None:
    """Tell which step was begun, and do in it what the command line asks for."""
    if run.is_main and args.told is not None:
        with (args.told / "steps").open("a") as file:
            file.write(f"{run.position.step + 1}\n")
    if run.rank == 1 and run.position.step + 1 == args.kill_at:
        dying.die_once_committed()
    time.sleep(args.pause)


def learn(batches: Iterable[Any]) -> None:
    """Make a step of each batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        torch.autograd.backward(loss * batch.share)
        optimizer.step()
        run.step(loss=loss)


def after_epoch() -> None:
    """Do what follows the batches of an epoch."""
    scheduler.step()
    tally.epochs += 1


def epochs() -> None:
    """Epochs, with what follows each inside."""
    for _ in run.epochs(EPOCHS):
        # As negatives that are drawn for each epoch.
        drawn = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002  # the global generators
        learn(run.batches(data, size=SIZE))
        tally.drawn += sum(drawn)
        after_epoch()


def phases() -> None:
    """Two phases, each with its data, and a rate that is set between them."""
    learn(run.batches(Numbers(FIRST), size=SIZE, epochs=FIRST_EPOCHS))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    learn(run.batches(Numbers(SECOND), size=SIZE, epochs=SECOND_EPOCHS, tail="short"))


class Trainer:
    """A trainer class."""

    def fit(self) -> None:
        """Train."""
        for epoch in run.epochs(EPOCHS):
            self.train_epoch()
            self.end_epoch(epoch)

    def train_epoch(self) -> None:
        """Train for an epoch."""
        for batch in run.batches(data, size=SIZE):
            self.train_batch(batch)

    def train_batch(self, batch: Any) -> None:
        """Learn from a batch."""
        loss = loss_of(batch)
        torch.autograd.backward(loss * batch.share)
        optimizer.step()
        optimizer.zero_grad()
        run.log(double=2 * float(loss))
        run.step(loss=loss)

    def end_epoch(self, epoch: int) -> None:
        """Measure, and go on with the next rate."""
        run.evaluate(data, loss=lambda outputs, _: outputs[1].mean(), name=f"after{epoch}")
        after_epoch()


def accumulated() -> None:
    """Updates of three passes each, some of which reach into the next epoch."""
    for batch in run.batches(data, size=SIZE, epochs=EPOCHS):
        moves = batch.end.step % PER_UPDATE == 0
        with nullcontext() if moves or run.world_size == 1 else wrapped.no_sync():  # type: ignore[operator]
            loss = loss_of(batch)
            torch.autograd.backward(loss * batch.share)
        if moves:
            optimizer.step()
            optimizer.zero_grad()
        run.step(loss=loss)


def gan() -> None:
    """Two models that learn from one another."""
    replicas = run.wrap(critic)
    for batch in run.batches(data, size=SIZE, epochs=EPOCHS):
        disturb()
        made, loss = wrapped(batch.inputs)
        critic_optimizer.zero_grad()
        judged = replicas(batch.inputs, made.detach())[1].mean()
        torch.autograd.backward(judged * batch.share)
        critic_optimizer.step()
        optimizer.zero_grad()
        fooled = loss.mean() - 0.1 * replicas(batch.inputs, made)[1].mean()
        torch.autograd.backward(fooled * batch.share)
        optimizer.step()
        run.step(loss=fooled)


def scaled() -> None:
    """A GradScaler, which leaves out the steps that overflow."""
    for batch in run.batches(data, size=SIZE, epochs=EPOCHS):
        optimizer.zero_grad()
        loss = loss_of(batch)
        factor = torch.inf if batch.end.step in OVERFLOWS else 1.0
        torch.autograd.backward(scaler.scale(loss * batch.share * factor))
        scaler.step(optimizer)
        scaler.update()
        run.step(loss=loss)


def own_data() -> None:
    """Data that the script reads itself; an epoch that was not finished begins anew."""
    numbers: Any = Numbers(range(OWN_SAMPLES))
    sampler: Any = DistributedSampler(numbers, run.world_size, run.rank, seed=3)
    loader: Any = DataLoader(numbers, OWN_SIZE // run.world_size, sampler=sampler)
    for epoch in run.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, _ in loader:
            disturb()
            optimizer.zero_grad()
            loss = wrapped(inputs)[1].mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss, samples=len(inputs))
        after_epoch()


def stopped() -> None:
    """Training that ends when a measurement is good enough."""
    for _ in run.epochs(EPOCHS):
        learn(run.batches(data, size=SIZE, tail="short"))
        after_epoch()
        measured = run.evaluate(data, loss=lambda outputs, _: outputs[1].mean(), name="val")
        if measured["loss"] < 0.5 - STOPS_AFTER:
            run.stop("good enough")


def plateau() -> None:
    """A rate that goes by what each epoch is measured to be."""
    for _ in run.epochs(EPOCHS):
        learn(run.batches(data, size=SIZE))
        scheduler.step(run.evaluate(data, loss=lambda outputs, _: outputs[1].mean())["loss"])
        tally.epochs += 1


def tell_end() -> None:
    """Write down what this rank ended with."""
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), tally.state_dict()]
    state += [value.state_dict() for value in more.values()]
    digest = blake2b(repr(state).encode())
    for tensors in (model.state_dict(), *([critic.state_dict()] if args.form == "gan" else [])):
        for tensor in tensors.values():
            digest.update(tensor.numpy().tobytes())
    (args.told / f"rank-{run.rank}").write_text(f"{run.position.step} {tally.epochs} {digest.hexdigest()}\n")


if args.form == "trainer":
    Trainer().fit()
else:
    forms = {"scaler": scaled, "accumulation": accumulated, "early_stopping": stopped}
    {**globals(), **forms}[args.form]()
if run.is_finished and args.told is not None:
    tell_end()
run.finish()
