"""Job -> torchrun's argv and environment, each with its reason, and torchrun.sh."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.jobfile.tables.launching import is_address
from elasticflow.protocol import worker_environment
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.jobfile.tables.job import Job

ENTRY_POINT = "train.py"
BY_HAND = "by-hand"

# torch waits 30 s for late nodes and 15 s before it misses a lost node: a node loss takes 47.7 s, with these 5.6 s.
C10D_CONF: Mapping[str, str | int | float | bool] = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}

_STORE_OPTIONS = ("protocol", "ca_cert", "ssl_cert", "ssl_cert_key")  # options of etcd

_REASONS = {
    "--nnodes": "fewest and most nodes",
    "--nproc-per-node": "workers of each node",
    "--rdzv-backend": "how nodes find each other",
    "--rdzv-endpoint": "where they do; port 0: a free one, on this machine",
    "--rdzv-conf": "a late or lost node is noticed in seconds",
    "--max-restarts": "of each agent; `elasticflow run` counts the whole run's instead",
    "--monitor-interval": "seconds between looks at the workers",
    "--shutdown-timeout": "seconds from SIGTERM to SIGKILL: snapshots.grace",
}


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
    # Each machine finds its own interface that has a given address, or an address of a given network.
    if job.nodes.interface is not None and not is_address(job.nodes.interface):
        reason = "workers talk over nodes.interface"
        listed.append(Variable("GLOO_SOCKET_IFNAME", job.nodes.interface, reason))
        listed.append(Variable("NCCL_SOCKET_IFNAME", job.nodes.interface, reason))
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


def script(
    job_name: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    reasons: Mapping[str, str],
    env: Mapping[str, str],
    secrets: Sequence[str],
    program: Sequence[str] | None = None,
    root: str = ".",
    path: Sequence[str] = (),
) -> str:
    """Return torchrun.sh: the launch by plain torchrun, from any working directory.

    Args:
        job_name: Name of the job, for the comment at the top.
        args: torchrun's arguments: options, then the program.
        secrets: Names of variables whose values must not be written to a file.
        program: The job's own script as at the end of *args*; None: the launch's train.py.
        root: The project root, relative to the launch folder; a script is started there.
        path: Further folders that the job's own script imports from, relative to the project root.
    """
    own = len(program or (ENTRY_POINT,))
    options = args[:-own]
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains the job `{job_name}` with plain torchrun, without elasticflow's command; the same on every node.",
        "# Options given to this script go to torchrun and win over those below: bash torchrun.sh --nnodes=1",
        "set -euo pipefail",
        'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        "",
        "# which run this is: the same id continues with its snapshots",
        f'export {worker_environment.RUN_ID}="${{{worker_environment.RUN_ID}:-{BY_HAND}}}"',
        "# where logs go, and snapshots unless the job names a place",
        f'export {worker_environment.RUN_FOLDER}="${{{worker_environment.RUN_FOLDER}:-${{here}}}}"',
    ]
    reason_before = None
    for name, value in environ.items():
        if reasons[name] != reason_before:
            lines.append(f"# {reasons[name]}")
        reason_before = reasons[name]
        lines.append(f"export {name}={shlex.quote(value)}")
    if env or secrets:
        lines.append("# [env] of the job")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items() if name not in secrets]
    for name in secrets:
        lines.append(f'export {name}="${{{name}:?set it: a secret of [env], which no record holds}}"')
    if "--rdzv-backend=etcd-v2" in options:
        lines.append(
            "# etcd remembers for two hours that a rendezvous is over: to continue, add --rdzv-id=ANOTHER-NAME"
        )
    lines += ["", "options=(", *(f"    {_option(option)}" for option in options)]
    if "--rdzv-backend=static" in options:
        lines.append('    --node-rank="${NODE_RANK:?set NODE_RANK to this node\'s number, from 0}"')
    lines += [f'    --rdzv-id="${{{worker_environment.RUN_ID}}}"', ")"]
    started = f'"${{here}}/{ENTRY_POINT}"'
    if program is not None:
        lines += [
            "# where the script is started, and its paths begin",
            f'cd -- "${{here}}/"{shlex.quote(root)}',
            *(f'export PYTHONPATH="${{PYTHONPATH:+${{PYTHONPATH}}:}}"{_from_here(part)}' for part in path),
        ]
        started = shlex.join(program)
    lines += [
        f'exec "${{PYTHON:-python}}" -m torch.distributed.run "${{options[@]}}" "$@" {started}',
        "",
    ]
    return "\n".join(lines)


def _from_here(folder: str) -> str:
    return shlex.quote(folder) if folder.startswith("/") else f'"${{PWD}}/"{shlex.quote(folder)}'


def _option(option: str) -> str:
    reason = _REASONS.get(option.partition("=")[0])
    return f"{shlex.quote(option)}  # {reason}" if reason else shlex.quote(option)
