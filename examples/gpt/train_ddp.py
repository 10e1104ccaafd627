"""What job.toml says, written by hand: the same training with DistributedDataParallel, for torchrun.

    torchrun --standalone --nproc-per-node 2 train_ddp.py

What it does not do: continue after a kill in the midst of an epoch with no sample lost or repeated, with another number of
workers, or from a snapshot that was half written; restart only what died; log what happened.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, Sonnets, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

WARMUP, FINAL = 50, 0.1
BATCH_SIZE, LR, WEIGHT_DECAY = 32, 2e-3, 0.1
EVERY = 100


def warmup_cosine(step: int, steps: int) -> float:
    """Return the learning rate of *step*, from 0, of *steps*, as a share of the highest."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * progress)) / 2


def optimizer_of(model: GPT) -> AdamW:
    """Return AdamW that lets biases and norms decay no weight."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=LR, betas=(0.9, 0.99))


@torch.no_grad()
def evaluate(model: GPT, data: Sonnets, device: torch.device) -> float:
    """Return the mean loss over *data*; every rank measures its share."""
    model.eval()
    total = torch.zeros(2, device=device)
    mine = range(dist.get_rank(), len(data), dist.get_world_size())
    for tokens, targets in DataLoader(torch.utils.data.Subset(data, mine), batch_size=256):
        loss = cross_entropy(model(tokens.to(device)), targets.to(device))
        total += torch.stack((loss * len(tokens), torch.tensor(len(tokens), device=device)))
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main() -> None:
    """Train as one worker of torchrun's group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--snapshot", type=Path, default=Path("snapshot.pt"), help="to save, and to resume from"
    )
    options = parser.parse_args()

    dist.init_process_group()
    rank, workers, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)

    torch.manual_seed(options.seed)
    train_set, val_set = Sonnets("train"), Sonnets("val")
    model = GPT(GPTConfig(train_set.vocab_size)).to(device)
    optimizer = optimizer_of(model)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, steps=options.steps))
    step = 0
    if options.snapshot.exists():
        state = torch.load(options.snapshot, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
    replicas = DistributedDataParallel(model)
    torch.manual_seed(options.seed + 1000 * rank + step)  # ranks draw dropout of their own

    sampler: DistributedSampler[object] = DistributedSampler(train_set, seed=options.seed, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE // workers, sampler=sampler, drop_last=True)
    for epoch in itertools.count(step // len(loader)):
        sampler.set_epoch(epoch)
        for tokens, targets in itertools.islice(loader, step % len(loader), None):
            optimizer.zero_grad()
            loss = cross_entropy(replicas(tokens.to(device)), targets.to(device))
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % EVERY == 0:
                measured = evaluate(model, val_set, device)
                if rank == 0:
                    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "scheduler": scheduler.state_dict()}, options.snapshot)
                    print(
                        f"step {step}/{options.steps}  loss {loss.item():.4f}  val loss {measured:.4f}",
                        flush=True,
                    )
            if step == options.steps:
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
