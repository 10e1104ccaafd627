"""Job -> torchrun's argv and environment, each variable with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.jobfile.tables.job import Job

ENTRY_POINT = "train.py"

# torch waits 30 s for late nodes and 15 s before it misses a lost node: a node loss takes 47.7 s, with these 5.6 s.
C10D_CONF: Mapping[str, str | int | float | bool] = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}

_STORE_OPTIONS = ("protocol", "ca_cert", "ssl_cert", "ssl_cert_key")  # options of etcd


@dataclass(frozen=True)
class Variable:
    """An environment variable of a launch and why it is set."""

    name: str
    value: str
    reason: str


def variables(job: Job) -> tuple[Variable, ...]:
    """Return the variables of every process of a launch, in a fixed order."""
    threads = "workers set their threads themselves; a fork server that ran threads would hang them"
    listed = [
        Variable(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "1",
            "torch reuses one store for all restarts, so workers read dead workers' addresses and hang",
        ),
        Variable("OMP_NUM_THREADS", "1", threads),
        Variable("MKL_NUM_THREADS", "1", threads),
        Variable("OPENBLAS_NUM_THREADS", "1", threads),
        Variable(
            "PYTORCH_NVML_BASED_CUDA_CHECK",
            "1",
            "asking whether there is a GPU must not open the driver, which would forbid forking",
        ),
    ]
    if job.script is None and job.train.consistency == "exact":
        reason = "without a fixed workspace cuBLAS may add in another order each time"
        name, value = worker_environment.CUBLAS_WORKSPACE_CONFIG, worker_environment.CUBLAS_WORKSPACE
        listed.append(Variable(name, value, reason))
    device = job.nodes.device_of_workers
    if device != "auto":
        listed.append(Variable(worker_environment.DEVICE, device, "workers train on nodes.device"))
    if device == "cpu":
        reason = "a process that does not see a GPU opens no context on it"
        listed += [Variable(name, "", reason) for name in worker_environment.HIDING]
    if (interface := job.nodes.interface_name) is not None:
        reason = "workers talk over nodes.interface"
        listed.append(Variable("GLOO_SOCKET_IFNAME", interface, reason))
        listed.append(Variable("NCCL_SOCKET_IFNAME", interface, reason))
    return tuple(listed)


def arguments(job: Job, program: Sequence[str] = (ENTRY_POINT,)) -> tuple[str, ...]:
    """Return torchrun's argv after its own name, without `--rdzv-id`; the program comes last."""
    table, nodes = job.torchrun, job.nodes
    flags: dict[str, str | int | float | None] = {
        "--nnodes": f"{nodes.min}:{nodes.max}",
        "--nproc-per-node": nodes.nproc_per_node,
        "--rdzv-backend": table.rdzv_backend,
        "--rdzv-endpoint": nodes.endpoint or "localhost:0",
        "--rdzv-conf": _rdzv_conf(job) or None,
        "--max-restarts": job.restarts.budget,
        "--monitor-interval": repr(table.monitor_interval).removesuffix(".0"),
        "--shutdown-timeout": math.ceil(parse_duration(job.snapshots.grace)),
        "--redirects": table.redirects,
        "--tee": table.tee,
        "--local-ranks-filter": table.local_ranks_filter,
        "--numa-binding": table.numa_binding,
        "--log-dir": table.log_dir,
    }
    return (*(f"{flag}={value}" for flag, value in flags.items() if value is not None), *program)


def store_options(job: Job) -> dict[str, str]:
    """Return the part of the rendezvous configuration that says how to connect to the store."""
    return {key: str(value) for key, value in job.torchrun.rdzv_conf.items() if key in _STORE_OPTIONS}


def _rdzv_conf(job: Job) -> str:
    defaults = C10D_CONF if job.torchrun.rdzv_backend == "c10d" else {}
    values = {**defaults, **job.torchrun.rdzv_conf}
    return ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
    )
