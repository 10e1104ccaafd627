"""The job of the recovery benchmark as a script for Ray Train: the loop of `recovery_script.py`, Ray's own failure handling.

Ray's controller saves what each rank reports every 20 steps, starts all workers again when one of them has died, as often
as that happens, and hands them the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train as ray_train
from ray.train.torch import TorchConfig, TorchTrainer

from tests.measured.benchmarks.recovery_script import train

WORKERS = 2


def loop(config: dict[str, str]) -> None:
    """Train as one of Ray's workers until killed."""
    sys.path.insert(0, config["project"])

    def newest() -> dict[str, Any] | None:
        checkpoint = ray_train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            state: dict[str, Any] = torch.load(Path(folder) / "snapshot.pt", weights_only=True)
            return state

    def save(state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                torch.save(state, Path(folder) / "snapshot.pt")
                checkpoint = ray_train.Checkpoint.from_directory(folder)
            ray_train.report({"step": state["step"]}, checkpoint=checkpoint)

    # The process group is there already.
    train(config["model"], Path(config["folder"]), start=lambda: None, newest=newest, save=save)


def main() -> None:
    """Start Ray on this machine and train until killed: `recovery_ray_script.py MODEL FOLDER`."""
    model, folder = sys.argv[1:]
    project = os.getcwd()  # noqa: PTH109
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config={"model": model, "folder": folder, "project": project},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray_train.ScalingConfig(num_workers=WORKERS),
        run_config=ray_train.RunConfig(
            name="recovery",
            storage_path=folder,
            failure_config=ray_train.FailureConfig(max_failures=-1),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
