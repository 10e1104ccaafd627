"""jobs/mnist.toml as a script written by hand: DistributedDataParallel, torchrun and a snapshot file.

    torchrun --standalone --nproc-per-node 2 --max-restarts 5 examples/ddp_tutorial/train_ddp.py

It is what the tutorials teach, complete: process group, sampler, the loop, the schedule, evaluation, a snapshot by
rank 0 and resuming from it. README.md sets it beside the job file, and the benchmarks measure against it.

What it does not do: stop in the middle of an epoch, keep more than one snapshot, notice a half-written or damaged
one, use another number of workers without repeating or losing samples, or say what happened.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.mnist import Digits, Net, accuracy, digits

SEED = 1234
EPOCHS = 10
GLOBAL_BATCH_SIZE = 64
LEARNING_RATE = 3e-3
CLIP_GRAD_NORM = 1.0


class Trainer:
    """Model, data and optimizer of this process, and the loop over them."""

    def __init__(self, snapshot: Path, root: str | None) -> None:
        """Build everything, and go on from *snapshot* if there is one; every rank."""
        self.rank = dist.get_rank()
        self.snapshot = snapshot
        torch.manual_seed(SEED)
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        train_set, self.test_set = digits("train", root), digits("test", root)
        self.loader: DataLoader[tuple[Tensor, int]] = DataLoader(
            train_set,
            batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(),
            sampler=DistributedSampler(train_set, seed=SEED),
        )
        self.model = Net(width=32).to(self.device)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.scheduler: LRScheduler = CosineAnnealingLR(self.optimizer, T_max=EPOCHS)
        self.first_epoch = 0
        if snapshot.exists():
            self._load()
        self.replicas = DistributedDataParallel(self.model)

    def train(self) -> float:
        """Train to the last epoch and return the accuracy on the test set; every rank."""
        measured = 0.0
        for epoch in range(self.first_epoch, EPOCHS):
            loss = self._run_epoch(epoch)
            self.scheduler.step()
            measured = evaluate(self.model, self.test_set, self.device)
            if self.rank == 0:
                self._save(epoch)
                print(f"epoch {epoch + 1}/{EPOCHS}  loss {loss:.4f}  accuracy {measured:.4f}", flush=True)
        return measured

    def _run_epoch(self, epoch: int) -> float:
        sampler = self.loader.sampler
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(epoch)
        self.model.train()
        loss = torch.zeros(())
        for inputs, targets in self.loader:
            loss = self.step(inputs.to(self.device), targets.to(self.device))
        return loss.item()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Do one optimizer step and return this rank's loss; every rank."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.replicas(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD_NORM)
        self.optimizer.step()
        return loss.detach()

    def _save(self, epoch: int) -> None:
        state = {
            "epoch": epoch + 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, self.snapshot)

    def _load(self) -> None:
        state = torch.load(self.snapshot, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.first_epoch = state["epoch"]


@torch.no_grad()
def evaluate(model: nn.Module, test_set: Digits, device: torch.device) -> float:
    """Return the accuracy over all of *test_set*; each rank does all of it."""
    model.eval()
    right = 0.0
    for inputs, targets in DataLoader(test_set, batch_size=256):
        right += accuracy(model(inputs.to(device)), targets.to(device)).item() * len(targets)
    return right / len(test_set)


def main() -> None:
    """Train as one worker of torchrun's group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--snapshot", type=Path, default=Path("snapshot.pt"), help="where to save, and go on from"
    )
    parser.add_argument("--root", default=None, help="folder or URL with MNIST's four files")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(options.snapshot, options.root).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
