"""DistributedDataParallel under torchrun, as its tutorials have it: rank 0 saves, all load, the sampler is wound on."""

import os
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, EPOCHS, SAVE_EVERY, SEED, STATE, Counted, CountedSGD, Samples, loss_of

CHECKPOINT = STATE / "checkpoint.pt"


def save(model: Counted, optimizer: CountedSGD, step: int) -> None:
    """Write the state beside the old one, then take its place."""
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, CHECKPOINT.with_suffix(".tmp"))
        os.replace(CHECKPOINT.with_suffix(".tmp"), CHECKPOINT)


def main() -> None:
    """Train."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PG_TIMEOUT_S", "1800"))))
    torch.manual_seed(SEED)
    model = Counted()
    optimizer = CountedSGD(model.parameters())
    step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicas = DistributedDataParallel(model)
    dataset = Samples()
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    first, skipped = divmod(step, len(loader))
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, skipped, None):
            optimizer.zero_grad()
            loss_of(replicas(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(model, optimizer, step)
        skipped = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
