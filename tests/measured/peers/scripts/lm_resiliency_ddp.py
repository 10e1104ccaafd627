"""DistributedDataParallel under torchrun with lm-resiliency's checkpoints in memory and on the node's disk (GEMINI)."""

import os
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, EPOCHS, SAVE_EVERY, SEED, STATE, Counted, CountedSGD, Samples, loss_of


def main() -> None:
    """Train."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PG_TIMEOUT_S", "1800"))))
    torch.manual_seed(SEED)
    model = Counted()
    optimizer = CountedSGD(model.parameters())
    replicas = DistributedDataParallel(model)
    resiliency = enable_resiliency(
        replicas,
        optimizer,
        interval=SAVE_EVERY,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            disk_flush_interval=SAVE_EVERY,
            disk_folder=str(STATE),
            run_id="peers",
            replication_jump=1,
            pin_memory=False,
            verify_integrity=True,
        ),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    step = resiliency.step_count
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
        skipped = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
