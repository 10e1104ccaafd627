"""A loop of a script's own that shards its model itself, by torch's `fully_shard`; variations come from the command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import elasticflow as ef
from elasticflow.runtime.process.sharded_tensors import is_sharded
from tests.runtime.programs import dying
from tests.runtime.programs.sharded_parts import Net, Sentences

if TYPE_CHECKING:
    from collections.abc import Iterator

parser = argparse.ArgumentParser()
parser.add_argument(
    "--degree", type=int, default=0, help="ranks that share a model; 0: every rank has all of it"
)
parser.add_argument("--own-meshes", action="store_true", help="a mesh for each replica, not one of all ranks")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--every", default="4 steps")
parser.add_argument(
    "--kill-at", type=int, help="rank 0 gets SIGKILL during this step, once a snapshot is committed"
)
parser.add_argument("--term-at", type=int, help="rank 0 gets SIGTERM during this step")
parser.add_argument("--flip-at", type=int, help="a bit of rank 1's part is flipped in this step")
parser.add_argument("--width", type=int, default=6)
parser.add_argument(
    "--stop-in-metric", action="store_true", help="rank 1 raises StopTraining in the evaluation"
)
parser.add_argument(
    "--average", choices=("dict", "object"), help="the loop's own average of the weights, part by part"
)
parser.add_argument(
    "--accumulate",
    action="store_true",
    help="the optimizer moves in every second pass; no exchange in the others",
)
parser.add_argument("--leave-at", type=int, help="the last rank leaves its loop in this step, by itself")
parser.add_argument(
    "--leave-by",
    default="break",
    choices=("break", "exit", "skip", "look", "block", "measure", "evaluate", "gather", "all"),
    help="how; skip: only this step's forward; look: that of an evaluation by hand; block: the last block of all forwards; measure: "
    "a forward behind an epoch's batches; evaluate: run.evaluate behind the step; gather: a parameter is gathered; all: every rank, by break after the step",
)
parser.add_argument("--cut", default="rows", help="columns: along the second dimension")
parser.add_argument(
    "--meta",
    choices=("left", "filled"),
    help="the model is sharded on the meta device; filled: and has values then",
)
args = parser.parse_args()


class CountingNet(Net):
    """The net whose buffer counts calls in training."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of words."""
        if self.training:
            self.calls += 1
        if args.leave_by == "block" and at["step"] == args.leave_at and run.rank == run.world_size - 1:
            x = self.embed(tokens).mean(1)
            for block in list(self.blocks)[:-1]:
                x = block(x)
            scores: Tensor = self.head(self.frozen(x))
            return scores
        return super().forward(tokens)


def shard(model: Net) -> None:
    """Shard the model among the ranks of a replica."""
    ranks = run.world_size // args.degree, args.degree
    mesh: Any
    if args.own_meshes:
        group: Any = None
        for first in range(0, run.world_size, args.degree):
            made = torch.distributed.new_group(list(range(first, first + args.degree)))
            group = made if first <= run.rank < first + args.degree else group
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    elif ranks[0] == 1:
        mesh = init_device_mesh("cpu", (args.degree,))
    else:
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {}
    if args.cut == "columns":
        from torch.distributed.tensor import Shard

        options["shard_placement_fn"] = lambda p: (
            Shard(1) if p.dim() > 1 and p.shape[1] % args.degree == 0 else None
        )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole_state() -> dict[str, list[Any]]:
    """Return every tensor of model and optimizer, whole, as numbers. Collective."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = dict(model.state_dict())
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    if args.average:
        tensors |= {f"average.{name}": tensor for name, tensor in average.weights.items()}
    return {
        name: (tensor.full_tensor() if is_sharded(tensor) else tensor).tolist()
        for name, tensor in sorted(tensors.items())
    }


class Average:
    """An average of the weights that has a state of its own."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state."""
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])


at = {"step": 0}
run = ef.join(seed=7, every=args.every, threads=1)
torch.manual_seed(5)
with torch.device("meta" if args.meta else "cpu"):
    model = CountingNet(args.width)
if args.degree:
    shard(model)
if args.meta == "filled":
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, 0.1)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
average = Average()
if args.average:
    average.weights |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
own: dict[str, Any] = {"dict": {"average": average.weights}, "object": {"average": average}}
run.keep(model=model, optimizer=optimizer, **own.get(args.average, {}))
if run.position.step:
    state = whole_state()
    if run.rank == 0:
        print("restored " + json.dumps(state), flush=True)


def by_epochs() -> Iterator[Any]:
    """Yield the batches; behind those of an epoch the first rank measures by itself."""
    for _ in run.epochs(args.epochs):
        yield from run.batches(Sentences(96), size=12)
        if run.rank == 0:
            model(torch.zeros(1, 4, dtype=torch.int64))


batches = (
    by_epochs() if args.leave_by == "measure" else run.batches(Sentences(96), size=12, epochs=args.epochs)
)
for batch in batches:
    at["step"] = batch.end.step
    if run.rank == 0 and batch.end.step == args.kill_at:
        dying.die_once_committed()
    if run.rank == 0 and batch.end.step == args.term_at:
        os.kill(os.getpid(), signal.SIGTERM)
    is_last = run.rank == run.world_size - 1
    is_alone = is_last and batch.end.step == args.leave_at
    if is_alone and args.leave_by in ("break", "exit", "skip"):
        if args.leave_by == "skip":
            run.step(loss=0.0)
            continue
        if args.leave_by == "exit":
            raise SystemExit
        break
    moves = not args.accumulate or batch.end.step % 2 == 0
    if not args.accumulate:
        optimizer.zero_grad()
    elif args.degree:
        model.set_requires_gradient_sync(moves)  # type: ignore[operator]  # fully_shard has made it an FSDPModule
    tokens, targets = batch.inputs, batch.targets
    loss = cross_entropy(model(tokens), targets)
    torch.autograd.backward(loss * batch.share)
    if not args.degree:
        for parameter in model.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad, torch.distributed.ReduceOp.AVG)
    if moves:
        optimizer.step()
        if args.accumulate:
            optimizer.zero_grad()
    for name, weight in average.weights.items():
        weight.lerp_(model.get_parameter(name).detach(), 0.1)
    if run.rank == 1 and batch.end.step == args.flip_at:
        from elasticflow.runtime.snapshot.replicas import flip

        flip(model)
    model.eval()
    with torch.no_grad():
        if not is_alone or args.leave_by != "look":
            model(tokens)  # leaves the root's parameters gathered
    model.train()
    if is_alone and args.leave_by == "gather":
        optimizer.param_groups[0]["params"][0].full_tensor()
    run.step(loss=loss)
    if is_alone and args.leave_by == "evaluate":
        run.evaluate(Sentences(96), loss=cross_entropy)
    if args.leave_by == "all" and batch.end.step == args.leave_at:
        break


class Seen:
    """Counts what it is called with over the whole set."""

    def __init__(self) -> None:
        self.samples = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        self.samples += len(targets)

    def compute(self) -> float:
        """Return the number of samples."""
        return float(self.samples)


def of_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the highest scores."""
    if args.stop_in_metric and run.rank == 1:
        raise ef.StopTraining("good enough")
    return outputs.amax(1).mean()


if args.leave_at and args.leave_by == "break":
    run.finish()
state = whole_state()
if run.rank == 0:
    print("ended " + json.dumps(state), flush=True)
for metrics in ({"highest": of_batch}, {"seen": Seen}):
    # Two batches: ranks from 2 on have none, and their forwards are waited for.
    measured = run.evaluate(Sentences(96), loss=cross_entropy, metrics=metrics, size=5, samples=9)
    if run.rank == 0:
        print("measured " + json.dumps(measured), flush=True)
run.finish()
