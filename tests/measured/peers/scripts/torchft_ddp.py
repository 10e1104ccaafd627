"""torchft's fault-tolerant DDP, as its README and its sampler's documentation have it; one replica group for each worker."""

import os
from datetime import timedelta
from itertools import islice

import torch
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from workload import BATCH, SAVE_EVERY, SEED, STATE, STEPS, Counted, CountedSGD, Samples, loss_of

GROUP, GROUPS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
TIMEOUT = timedelta(seconds=float(os.environ.get("TORCHFT_TIMEOUT_S", "60")))
CHECKPOINT = STATE / f"checkpoint-{GROUP}.pt"


def main() -> None:
    """Train."""
    torch.manual_seed(SEED)
    dataset = Samples()
    sampler = DistributedSampler(
        dataset, replica_rank=GROUP, num_replica_groups=GROUPS, group_rank=0, num_replicas=1, seed=SEED
    )
    loader = DataLoader(dataset, batch_size=BATCH // GROUPS, sampler=sampler)
    counted = Counted()
    inner = CountedSGD(counted.parameters())

    def load(state):
        counted.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": counted.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"group_{GROUP}",
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(manager, counted)
    optimizer = Optimizer(manager, inner)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        load(state)
        manager.load_state_dict(state["manager"])
    while manager.current_step() < STEPS:
        # After a start or a recovery the sampler is wound on to the step of the others.
        epoch, skipped = divmod(manager.current_step(), len(loader))
        sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, skipped, None):
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            step = manager.current_step()
            if step % SAVE_EVERY == 0:
                state = {"model": counted.state_dict(), "optimizer": inner.state_dict()}
                torch.save({**state, "manager": manager.state_dict()}, CHECKPOINT.with_suffix(".tmp"))
                os.replace(CHECKPOINT.with_suffix(".tmp"), CHECKPOINT)
            if step >= STEPS:
                break
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
