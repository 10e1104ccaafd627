"""What the models accept and refuse: defaults, the frozen set of keys, and the schema that says the same."""

from __future__ import annotations

import pytest

from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.wording.type_descriptions import example, keys_at, model_at
from elasticflow.system.units import parse_duration, parse_interval, parse_size

KEYS = {
    "job": "name seed path",
    "script": "entry module args preload silence",
    "model": "entry args loss step loss_count flops_per_sample weights",
    "optimizer": "entry args clip_grad_norm groups",
    "lr_scheduler": "entry args interval metric",
    "dataset": "entry args mix shards prepare collate samples sampler global_batch_size micro_batch_size num_workers tail",
    "evaluation": "entry args samples every batch_size collate step metrics best weights overlap",
    "hooks": "on_start on_step on_evaluation on_snapshot on_finish",
    "train": "epochs steps precision tf32 channels_last compile gradient_checkpointing ema threads on_nonfinite consistency virtual_shards compare_replicas time_limit stop_when",
    "ddp": "find_unused_parameters sync_batchnorm bucket_cap_mb gradient_as_bucket_view",
    "parallel": "shard wrap reshard_after_forward init offload",
    "env": "",  # names of the job's own
    "nodes": "min max nproc_per_node device endpoint interface token_file",
    "restarts": "budget refill hang_timeout warm",
    "snapshots": "uri every memory staging_limit keep include ignore integrity grace options",
    "logging": "level every count_name grad_norm peak_flops sinks tensorboard mlflow wandb trackio otlp prometheus custom",
    "notify": "url format command on timeout",
    "torchrun": "rdzv_backend rdzv_conf start_method monitor_interval tee redirects local_ranks_filter numa_binding log_dir",
    "slurm": "form partition account qos time notice gpus gres mem cpus_per_task exclusive requeues output exit_codes srun setup extra",
    "kubernetes": "image form namespace workdir port rendezvous_pod resources shared_memory volumes env secrets node_selector "
    "tolerations network_policy service_account user pull_secrets priority_class queue labels annotations grace pre_stop backoff_limit "
    "ttl_after_finished patch",
    "ray": "resources labels placement",
    "matrix": "axes exclude cases",
}


def test_keys_of_the_job_file_are_frozen() -> None:
    """A key that is added or renamed changes this test and the changelog."""
    assert {name: " ".join(keys_at((name,))) for name in Job.model_fields} == KEYS
    assert keys_at(("snapshots", "keep")) == ["last", "best", "every", "within"]
    assert keys_at(("evaluation", "metrics", "f1")) == ["entry", "args", "over", "outputs", "targets"]
    assert keys_at(("evaluation", "val")) == keys_at(("evaluation",))
    assert keys_at(("optimizer", "groups", 0)) == ["match", "ndim", "module", "args", "name"]


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("500 steps", 500, "step"), ("1 epoch", 1, "epoch"), ("10 min", 600, "s"), ("1.5 h", 5400, "s"), ("90s", 90, "s"), ("1 d", 86400, "s"), ("2000 samples", 2000, "sample")],
)  # fmt: skip
def test_intervals_are_read(text: str, amount: float, unit: str) -> None:
    """A number and a unit, with or without a blank."""
    found = parse_interval(text)
    assert (found.amount, found.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text", ["", "5", "steps", "-1 steps", "0 min", "1.5 steps", "1 parsec", "1e3 steps", "٣ steps"]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    """Numbers without units, nought, parts of steps and unknown units are errors."""
    with pytest.raises(ValueError, match="must"):
        parse_interval(text)
    with pytest.raises(ValueError, match="must"):
        parse_duration("5 steps")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4 GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("500 MB", 500_000_000), ("7B", 7), (" 2 kB ", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    """A size is a number with a unit of bytes, decimal or binary."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["4", "4 gb", "GiB", "0 GiB", "-1 MB", "0.1 B", "4 GiB 2 MiB"])
def test_sizes_that_are_none(text: str) -> None:
    """Anything else is refused in words that say what is meant."""
    with pytest.raises(ValueError, match="must"):
        parse_size(text)


INNER = [
    ("dataset", "mix", 0), ("dataset", "collate"), ("dataset", "sampler"), ("optimizer", "groups", 0), ("evaluation", "val"),
    ("evaluation", "metrics", "accuracy"), ("hooks", "on_step"), ("logging", "custom", "mine"), ("kubernetes", "volumes", "data"),
    ("kubernetes", "tolerations", 0), ("env", "A"),
]  # fmt: skip


@pytest.mark.parametrize("path", [*((name,) for name in Job.model_fields), *INNER])
def test_each_key_that_a_table_needs_has_an_example(path: tuple[str | int, ...]) -> None:
    """Which is shown where the key is missing."""
    model = model_at(path)
    assert model is not None
    for key, field in model.model_fields.items():
        if field.is_required():
            assert example((*path, key)).startswith(f"{key} = ")
