#!/usr/bin/env bash
# For sites that start one script on each node and expect it to call torchrun. Set by the site, or by you:
#   HEAD    host of the first node        NODES   how many nodes there are
#   RUN_ID  the run's id: with the same one a run continues
#   SNAPSHOTS  a folder or an object store that all nodes see
# torchrun then restarts all workers after each failure, and the run ends with its first node: `elasticflow run` would do better.
set -euo pipefail

job="${JOB:-jobs/mnist.toml}"
build="$(mktemp -d)"
elasticflow plan "$job" -o "$build" \
  --set nodes.min="$NODES" --set nodes.max="$NODES" --set nodes.endpoint="${HEAD}:${PORT:-29400}" \
  --set snapshots.uri="$SNAPSHOTS"
ELASTICFLOW_RUN_ID="$RUN_ID" exec bash "$build/torchrun.sh" "$@"
