"""LaunchPlan -> torchrun.sh: the same launch by plain torchrun, each option with its reason."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from elasticflow.compiler.plan.launch_plan import torchrun_command
from elasticflow.compiler.plan.torchrun import ENTRY_POINT
from elasticflow.protocol import worker_environment

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan

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


def torchrun_script(plan: LaunchPlan, root: str) -> str:
    """Return torchrun.sh: the launch by plain torchrun, from any working directory.

    Args:
        root: The project root, relative to the launch folder; a script is started there.
    """
    program = (ENTRY_POINT,) if plan.script is None else torchrun_command(plan.script)
    options = plan.torchrun_args[: -len(program)]
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains the job `{plan.job_name}` with plain torchrun, without elasticflow's command; the same on every node.",
        "# Options given to this script go to torchrun and win over those below: bash torchrun.sh --nnodes=1",
        "set -euo pipefail",
        'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        "",
        "# which run this is: the same id continues with its snapshots",
        f'export {worker_environment.RUN_ID}="${{{worker_environment.RUN_ID}:-by-hand}}"',
        "# where logs go, and snapshots unless the job names a place",
        f'export {worker_environment.RUN_FOLDER}="${{{worker_environment.RUN_FOLDER}:-${{here}}}}"',
    ]
    reason_before = None
    for name, value in plan.environment.items():
        if plan.reasons[name] != reason_before:
            lines.append(f"# {plan.reasons[name]}")
        reason_before = plan.reasons[name]
        lines.append(f"export {name}={shlex.quote(value)}")
    if plan.env or plan.env_secrets:
        lines.append("# [env] of the job")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.public().env.items()]
    for name in plan.env_secrets:
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
    if plan.script is not None:
        lines += [
            "# where the script is started, and its paths begin",
            f'cd -- "${{here}}/"{shlex.quote(root)}',
            *(
                f'export PYTHONPATH="${{PYTHONPATH:+${{PYTHONPATH}}:}}"{_from_here(part)}'
                for part in plan.script.path
            ),
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
