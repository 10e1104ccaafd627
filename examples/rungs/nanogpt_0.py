"""A script in the manner of nanoGPT's train.py: one long loop, steps instead of epochs, gradients accumulated."""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from small import GPT, Letters
from torch import Tensor
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description="Train a small GPT.")
parser.add_argument("max_iters", type=int)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
arguments = parser.parse_args()
max_iters = arguments.max_iters
batch_size, gradient_accumulation_steps = 8, 4
learning_rate, min_lr, warmup_iters, grad_clip = 3e-3, 3e-4, 10, 1.0
eval_interval = 20
checkpoint_path = Path("nanogpt.pt")

ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, world_size = 0, 1
master_process = rank == 0
gradient_accumulation_steps //= world_size
torch.manual_seed(1337 + rank)

train_data, val_data = Letters(range(9)), Letters(range(9, 10))


def get_batch(data: Letters) -> tuple[Tensor, Tensor]:
    """Return pieces drawn at random: inputs, and what follows."""
    drawn = [data[int(index)] for index in torch.randint(len(data), (batch_size,))]
    return torch.stack([piece for piece, _ in drawn]), torch.stack([piece for _, piece in drawn])


def get_lr(iteration: int) -> float:
    """Return the learning rate of a step: a warm-up, then a cosine."""
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    ratio = min(1.0, (iteration - warmup_iters) / max(1, max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(train_data.vocab_size)
optimizer = model.configure_optimizers(learning_rate)
iter_num = 0
if checkpoint_path.exists():
    checkpoint = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    print(f"resuming after step {iter_num}", flush=True)
replicas: Any = DistributedDataParallel(model) if ddp else model
loss: Any = None


@torch.no_grad()
def estimate_loss() -> float:
    """Return the loss over some batches of the held-out text."""
    model.eval()
    losses = [model(*get_batch(val_data))[1].item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


while iter_num < max_iters:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num > 0 and iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state, checkpoint_path.with_suffix(".new"))
        checkpoint_path.with_suffix(".new").replace(checkpoint_path)
    for micro_step in range(gradient_accumulation_steps):
        inputs, targets = get_batch(train_data)
        replicas.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = replicas(inputs, targets)
        loss = loss / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    time.sleep(arguments.pause)

if ddp:
    destroy_process_group()
