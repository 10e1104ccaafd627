"""Ray Train v2, as its documentation has it: a TorchTrainer, `report` with a checkpoint, `get_checkpoint`."""

import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, EPOCHS, SAVE_EVERY, SEED, STATE, Counted, CountedSGD, Samples, loss_of


def loop() -> None:
    """Train as one of Ray's workers."""
    torch.set_num_threads(1)
    os.environ["PEERS_RANK"] = str(dist.get_rank())
    torch.manual_seed(SEED)
    model = Counted()
    optimizer = CountedSGD(model.parameters())
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicas = (
        ray.train.torch.prepare_model(model) if dist.get_world_size() > 1 else DistributedDataParallel(model)
    )
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
                with tempfile.TemporaryDirectory() as folder:
                    saved = None
                    if dist.get_rank() == 0:
                        state = {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "step": step,
                        }
                        torch.save(state, Path(folder) / "state.pt")
                        saved = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({"step": step}, checkpoint=saved)
        skipped = 0


def main() -> None:
    """Start the trainer once there are FIRST workers' CPUs: `ray_train.py ADDRESS LEAST MOST FIRST`."""
    address, (least, most, first) = sys.argv[1], map(int, sys.argv[2:])
    passed = {name: value for name, value in os.environ.items() if name.startswith("PEERS_")}
    ray.init(
        address=address,  # "local": a cluster of its own, whatever runs on this machine
        num_cpus=most + 1 if address == "local" else None,
        include_dashboard=False if address == "local" else None,
        log_to_driver=True,
        runtime_env={"env_vars": {**passed, "PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}},
    )
    while ray.cluster_resources().get("CPU", 0) < first:
        time.sleep(0.2)
    TorchTrainer(
        loop,
        torch_config=TorchConfig(
            backend="gloo", timeout_s=int(float(os.environ.get("PG_TIMEOUT_S", "1800")))
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=most if least == most else (least, most), elastic_resize_monitor_interval_s=5
        ),
        run_config=ray.train.RunConfig(
            name="peers",
            storage_path=str(STATE),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
