"""What the keys of a job file can look like, for editors' hover texts and completion.

Apart from the models, which `validate` builds each time and which have no use for them.
"""

from __future__ import annotations

from typing import Any

# Table and key to values; keys whose type lists their values, or whose type's own examples fit, are left out.
EXAMPLES: dict[str, dict[str, list[Any]]] = {
    "JobTable": {
        "name": ["mnist"],
        "seed": [1234],
        "path": [["."], [".", "src"]],
    },
    "ModelTable": {
        "args": [{"width": 32}],
        "loss": ["torch.nn.functional:cross_entropy"],
        "step": ["examples.mnist:training_step"],
        "loss_count": ["tokens:num_targets"],
        "weights": ["base.safetensors"],
    },
    "OptimizerTable": {
        "entry": ["torch.optim:AdamW"],
        "args": [{"lr": 1e-3}],
        "clip_grad_norm": [1.0],
    },
    "LrSchedulerTable": {
        "entry": ["torch.optim.lr_scheduler:CosineAnnealingLR"],
        "args": [{"T_max": 1000}],
    },
    "DatasetTable": {
        "entry": ["examples.mnist:digits"],
        "args": [{"split": "train"}],
        "shards": [16],
        "prepare": ["examples.mnist:download"],
        "collate": ["examples.mnist:collate"],
        "samples": [60_000],
        "global_batch_size": [256],
        "micro_batch_size": [64],
        "num_workers": [2],
    },
    "EvaluationTable": {
        "entry": ["examples.mnist:digits"],
        "args": [{"split": "test"}],
        "every": ["1 epoch", ["500 steps", "10 min"]],
        "batch_size": [256],
        "metrics": [{"accuracy": "examples.mnist:accuracy"}],
    },
    "TrainTable": {
        "epochs": [5],
        "steps": [2000],
        "ema": [0.999],
        "threads": [1],
        "virtual_shards": [8],
        "compare_replicas": ["1000 steps", "never"],
    },
    "DdpTable": {"bucket_cap_mb": [25]},
    "NodesTable": {
        "min": [1],
        "max": [4],
        "nproc_per_node": ["auto", "gpu", 8],
    },
    "RestartsTable": {"budget": [5]},
    "KeepTable": {
        "last": [3],
        "best": [1],
        "every": ["5000 steps", "1 epoch", "6 h"],
        "within": ["2 h"],
    },
    "SnapshotsTable": {
        "uri": ["s3://bucket/mnist", "/scratch/snapshots"],
        "every": ["10 min", ["500 steps", "10 min"]],
        "memory": ["1 step"],
        "keep": [{"last": 3, "best": 1}],
        "include": [{"vocabulary": "examples.text:vocabulary"}],
        "ignore": [["optimizer.last_norm"]],
        "options": [{"anon": True}],
    },
    "LoggingTable": {"sinks": [["tensorboard"]]},
    "TorchrunTable": {
        "rdzv_conf": [{"is_host": False}],
        "monitor_interval": [0.1],
        "local_ranks_filter": ["0"],
        "log_dir": ["logs"],
    },
}
