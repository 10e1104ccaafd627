"""Training loops of the common forms, as `elasticflow lint` and `init` read them."""

from __future__ import annotations

HEAD = """\
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAUSE = float(os.environ.get("PAUSE", "0"))


def points(samples=330, seed=0):
    places = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(places, (places.square().sum(1) < 1).long())


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


"""
# Both loops in one function; a schedule by epochs and a measurement behind each epoch.
PLAIN = (
    HEAD
    + """\
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="weights.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = points()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    seen = 0
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (inputs, targets) in enumerate(loader):
            loss = cross_entropy(model(inputs), targets)

            optimizer.zero_grad()
            loss.backward()  # exchanged while it continues
            optimizer.step()
            seen += 1
            time.sleep(PAUSE)
            if i % 5 == 0 and rank == 0:
                print(f"epoch {epoch} batch {i} step {seen} loss {loss.item():.3f}", flush=True)
        # behind the epoch
        scheduler.step()
        model.eval()
        with torch.no_grad():
            places, labels = points(100, seed=1).tensors
            accuracy = (model.module(places).argmax(1) == labels).float().mean().item()
        best = max(best, accuracy)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "rate": optimizer.param_groups[0]["lr"], "steps": seen}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
# The trainer class of tutorials: a checkpoint of its own, which it resumes from.
TRAINER = (
    HEAD
    + """\
def ddp_setup():
    dist.init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.path = path
        if os.path.exists(path):
            print("Loading checkpoint")
            self._load(path)
        self.model = DDP(self.model)

    def _load(self, path):
        checkpoint = torch.load(path, map_location="cpu")
        self.model.load_state_dict(checkpoint["model"])
        self.epochs_run = checkpoint["epochs"]

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for inputs, targets in self.loader:
            self._run_batch(inputs, targets)
            time.sleep(PAUSE)

    def _save(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epochs": epoch + 1}, self.path)

    def train(self, epochs: int):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save(epoch)


def prepare(data, batch_size: int):
    return DataLoader(data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(data))


def main(epochs: int, save_every: int, path: str = "weights.pt"):
    ddp_setup()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, prepare(points(), 16), optimizer, save_every, path)
    trainer.train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(4, 4)
"""
)
# A function for an epoch, called by main; a schedule by epochs beside it.
FUNCTIONS = (
    HEAD
    + """\
def train(args, model, loader, optimizer, epoch, criterion=cross_entropy):
    model.train()
    for i, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        output = model(inputs)
        loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
        time.sleep(PAUSE)
        if i % args.log_interval == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = points()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, loader, optimizer, epoch)
        scheduler.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "rate": scheduler.get_last_lr()[0]}, "weights.pt")


if __name__ == "__main__":
    main()
"""
)
ACCELERATE = (
    HEAD.replace("import torch\n", "import torch\nfrom accelerate import Accelerator\n", 1)
    + """\
def training_function(config):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(points(), shuffle=True, batch_size=config["batch_size"])
    model = network()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=20, gamma=0.7)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(config["epochs"]):
        model.train()
        for batch in loader:
            inputs, targets = batch
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(PAUSE)
        accelerator.print(f"epoch {epoch}: {loss.item():.3f}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"epochs": 4, "batch_size": 16})
"""
)
FABRIC = (
    HEAD.replace("import torch\n", "import torch\nfrom lightning_fabric import Fabric\n", 1)
    + """\
def train(fabric, model, optimizer, loader, scheduler, epochs=4):
    for epoch in range(epochs):
        train_epoch(fabric, model, optimizer, loader)
        scheduler.step()
        fabric.print(f"epoch {epoch} is done")


def train_epoch(fabric, model, optimizer, loader):
    model.train()
    for batch_idx, batch in enumerate(loader):
        inputs, targets = batch
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)
        if batch_idx % 5 == 0:
            fabric.print(f"{batch_idx}: {loss.item():.3f}")


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    fabric.launch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(points(), batch_size=16, shuffle=True))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train(fabric, model, optimizer, loader, scheduler)
    fabric.save("weights.pt", {"model": model})


if __name__ == "__main__":
    main()
"""
)
FORMS = {
    "plain": PLAIN,
    "trainer": TRAINER,
    "functions": FUNCTIONS,
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
}
