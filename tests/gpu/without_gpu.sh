#!/usr/bin/env bash
# The CUDA path on a machine without a GPU, by hand, in one command: torch's CUDA build (some 5 GB), an NVML and a driver that
# are only pretended (pretended/), and one row of a table for each check. Exit code: 0 if every row is as it should be.
#
#   tests/gpu/without_gpu.sh [--torch VERSION] [--environment FOLDER] [--before CHECKOUT] [--table FILE] [--tests] [--only ROW ...]
#
# --torch: 2.14.1. --environment: a virtual environment that has the CUDA build and the project's packages; else it is made, and
# deleted afterwards. --before: the product of another checkout is tried as well, for the column "before"; without it
# the column is taken from FILE as it is. FILE: tests/gpu/without_gpu.md. --tests: the launches of `run.sh`, too: minutes more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch=2.14.1 environment='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch) torch=$2; shift 2 ;;
    --environment) environment=$2; shift 2 ;;
    --tests) rest+=("$1"); shift ;;
    --before | --table) rest+=("$1" "$2"); shift 2 ;;
    --only) rest+=("$@"); break ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
  esac
done

work=$(mktemp -d -t elasticflow-without-gpu.XXXXXX)
trap 'rm -rf "$work"' EXIT
if [ -z "$environment" ]; then
  environment=$work/venv
  python3 -m venv "$environment"
  "$environment/bin/python" tests/gpu/packages.py > "$work/requirements.txt"
  "$environment/bin/python" -m pip install --quiet "torch==$torch" -r "$work/requirements.txt"
  "$environment/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
fi
python=$environment/bin/python
is_for_cuda='import sys, torch; sys.exit(torch.version.cuda is None)'
"$python" -c "$is_for_cuda" || { echo "$python has no CUDA build of torch: nothing can be shown" >&2; exit 1; }
mkdir "$work/nvml"
"${CC:-cc}" -shared -fPIC tests/gpu/pretended/nvml.c -o "$work/nvml/libnvidia-ml.so.1"
tests/gpu/pretended/device_files.sh 2 "$python" -m tests.gpu.without_gpu --nvml "$work/nvml" "${rest[@]}"
