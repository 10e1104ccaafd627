#!/usr/bin/env bash
# Everything that needs a GPU, in one command, within half an hour: makes an environment of its own, runs the tests marked
# `gpu`, measures restarts, and writes a table that names commit, GPU and versions.
#
#   tests/gpu/run.sh [--wheels FOLDER] [--table FILE]
#
# A python3 whose torch sees the GPU is used as it is; else torch is installed. --wheels: packages are taken from FOLDER
# alone, for a machine without a package index. FILE: tests/gpu/results.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

wheels='' table=tests/gpu/results.md
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift 2 ;;
    --table) table=$2; shift 2 ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
  esac
done

work=$(mktemp -d -t elasticflow-gpu.XXXXXX)
trap 'rm -rf "$work"' EXIT
python3 -m venv --system-site-packages "$work/venv"
python=$work/venv/bin/python
from=()
[ -z "$wheels" ] || from=(--no-index --find-links "$wheels")
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
"$python" -c "$sees_gpu" 2>/dev/null || "$python" -m pip install --quiet "${from[@]}" 'torch>=2.13,<2.16'
"$python" -c "$sees_gpu" || { echo "torch sees no GPU here: nothing can be shown" >&2; exit 1; }
# What these tests import, without what the others do.
"$python" -m pip install --quiet "${from[@]}" safetensors fsspec rich psutil 'pydantic>=2.7' 'click>=8.1' \
  pytest pytest-timeout hypothesis pexpect hatchling editables
"$python" -m pip install --quiet --no-deps --no-build-isolation -e .
"$python" -m tests.gpu.measure --table "$table"
