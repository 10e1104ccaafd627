"""Snapshots of real training state, through a real writer process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.run_folder import snapshot_name
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.runtime.state.state import State
from elasticflow.snapshots.client.messages import SnapshotReport
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.snapshots.client.staging import StagingClient


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch use one: tiny tensors on several wait for each other, the longer the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """A model with what is hard to store: ties, another memory format, bfloat16, scalars, nothing, a frozen layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.conv = nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(width, dtype=torch.bfloat16))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.still = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.register_buffer("nothing", torch.zeros(0, 4))

    def forward(self, numbers: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        """Use every parameter."""
        found = self.norm(self.still(self.embed(numbers)) + self.conv(picture).mean((2, 3)))
        out: torch.Tensor = self.head(found * self.scale)
        return out


class Training:
    """A model in training, every stateful object with it."""

    def __init__(self, seed: int = 0, model: nn.Module | None = None) -> None:
        torch.manual_seed(seed)
        self.model = model or Net()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.scheduler = StepLR(self.optimizer, step_size=2)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.state = State(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, ema=self.ema)
        self.steps = 0

    def step(self, count: int = 1) -> None:
        """Take steps on data that depends on the step alone."""
        for _ in range(count):
            draws = torch.Generator().manual_seed(self.steps)
            numbers = torch.randint(0, 20, (6,), generator=draws)
            picture = torch.randn(6, 3, 4, 4, generator=draws)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(numbers, picture).float(), numbers).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.steps += 1

    def take(self, clients: Sequence[StagingClient], generation: int = 1, **about: Any) -> str:
        """Take a snapshot through the ranks' clients, all of one generation; return its name once it is committed."""
        captured, world = self.state.capture(), len(clients)
        name = snapshot_name(self.steps, generation, f"{self.steps:08x}")
        content = {"position": {"step": self.steps, "epoch": 0, "samples": 6 * self.steps}}
        facts = ManifestFacts(
            trigger="steps",
            samples=6 * self.steps,
            aliases=captured.aliases,
            memory_formats=captured.memory_formats,
            versions={"torch": str(torch.__version__)},
            **about,
        )
        record = SnapshotRecord({**content, "state": captured.tree}, facts)
        for rank, client in enumerate(clients):
            shard = ShardPlanner(rank, world).shard_of(captured)
            entries = shard.copy_into(client.buffer(shard.nbytes, timeout_s=100))
            client.stage(
                name=name,
                step=self.steps,
                tensors=entries,
                nbytes=shard.nbytes,
                record=record if rank == 0 else None,
            )
        for client in clients:
            reports = [report for report in client.flush(30) if isinstance(report, SnapshotReport)]
            outcomes = [report.event for report in reports if report.name == name]
            assert outcomes == ["snapshot.committed"]
        return name
