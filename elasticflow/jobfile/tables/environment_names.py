"""Variables that a job cannot set for its workers, and the keys to use instead."""

from __future__ import annotations

_THREADS = "write train.threads: workers set their threads themselves"
_TORCHRUN = "it is set for each worker when it is started; your code may read it"
_PLACES = "write nodes.endpoint"

_REFUSED = {
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
    "OPENBLAS_NUM_THREADS": _THREADS,
    "MASTER_ADDR": _PLACES,
    "MASTER_PORT": _PLACES,
    "PET_NNODES": "write nodes.min and nodes.max",
    "PET_NPROC_PER_NODE": "write nodes.nproc_per_node",
    "PYTHONPATH": "write job.path: folders of your own code, relative to the project",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "without it a look for GPUs opens the driver, and workers cannot be forked",
    "PYTHONUNBUFFERED": "workers are unbuffered",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers that are started again would look for dead ones",
}
_OF_WORKERS = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
})  # fmt: skip
_OURS = ("ELASTICFLOW_", "_ELASTICFLOW_", "TORCHELASTIC_", "PET_")


def why_refused(name: str) -> str | None:
    """Return the remedy for a variable that a job cannot set; None if a job may set it."""
    if name in _REFUSED:
        return _REFUSED[name]
    return _TORCHRUN if name in _OF_WORKERS or name.startswith(_OURS) else None
