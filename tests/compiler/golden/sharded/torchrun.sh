#!/usr/bin/env bash
# Trains the job `sharded` with plain torchrun, without elasticflow's command; the same on every node.
# Options given to this script go to torchrun and win over those below: bash torchrun.sh --nnodes=1
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# which run this is: the same id continues with its snapshots
export ELASTICFLOW_RUN_ID="${ELASTICFLOW_RUN_ID:-by-hand}"
# where logs go, and snapshots unless the job names a place
export ELASTICFLOW_RUN_FOLDER="${ELASTICFLOW_RUN_FOLDER:-${here}}"
# torch reuses one store for all restarts, so workers read dead workers' addresses and hang
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# workers set their threads themselves; a fork server that ran threads would hang them
export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
# asking whether there is a GPU must not open the driver, which would forbid forking
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# without a fixed workspace cuBLAS may add in another order each time
export CUBLAS_WORKSPACE_CONFIG=:4096:8

options=(
    --nnodes=1:3  # fewest and most nodes
    --nproc-per-node=2  # workers of each node
    --rdzv-backend=c10d  # how nodes find each other
    --rdzv-endpoint=head:29400  # where they do; port 0: a free one, on this machine
    --rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3  # a late or lost node is noticed in seconds
    --max-restarts=3  # of each agent; `elasticflow run` counts the whole run's instead
    --monitor-interval=0.1  # seconds between looks at the workers
    --shutdown-timeout=30  # seconds from SIGTERM to SIGKILL: snapshots.grace
    --rdzv-id="${ELASTICFLOW_RUN_ID}"
)
exec "${PYTHON:-python}" -m torch.distributed.run "${options[@]}" "$@" "${here}/train.py"
