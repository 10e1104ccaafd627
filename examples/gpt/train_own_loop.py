"""train_ddp.py on elasticflow's six calls: the same loop, which continues in the midst of an epoch, at any number of workers.

    torchrun --standalone --nproc-per-node 2 train_own_loop.py
    python train_own_loop.py

Process group, device, seeds, sampler, the way back into the epoch, snapshots and evaluation by ranks have gone.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from gpt import GPT, GPTConfig, Sonnets, cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import elasticflow as ef

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


def main() -> None:
    """Train as one worker of torchrun's group, or alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    run = ef.join(seed=options.seed, every=f"{EVERY} steps")
    train_set, val_set = Sonnets("train"), Sonnets("val")
    model = GPT(GPTConfig(train_set.vocab_size)).to(run.device)
    optimizer = optimizer_of(model)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, steps=options.steps))
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    replicas = run.wrap(model)

    for batch in run.batches(train_set, size=BATCH_SIZE, steps=options.steps):
        optimizer.zero_grad()
        loss = cross_entropy(replicas(batch.inputs), batch.targets)
        torch.autograd.backward(loss * batch.share)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.step(loss=loss)
        step = run.position.step
        if step % EVERY == 0:
            measured = run.evaluate(val_set, loss=cross_entropy, name="val")["loss"]
            if run.rank == 0:
                print(
                    f"step {step}/{options.steps}  loss {loss.item():.4f}  val loss {measured:.4f}",
                    flush=True,
                )
    run.finish()


if __name__ == "__main__":
    main()
