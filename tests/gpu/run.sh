#!/usr/bin/env bash
# Everything that needs a GPU, in one command, within half an hour: makes an environment of its own, runs the tests marked
# `gpu`, measures restarts, and leaves a folder with the table, the machine, the logs and the digests of final weights.
#
#   tests/gpu/run.sh [--wheels FOLDER] [--out FOLDER] [--seconds N] [--dry]
#
# A python3 whose torch sees the GPU is used as it is; else torch is installed. --wheels: packages are taken from FOLDER
# alone, for a machine without a package index. --out: tests/gpu/results/DATE-COMMIT. --seconds: 1500, without the
# installation. --dry: installs, and collects the tests, on any machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

wheels='' is_dry='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift 2 ;;
    --out | --seconds) rest+=("$1" "$2"); shift 2 ;;
    --dry) is_dry=1; rest+=("$1"); shift ;;
    *) sed -n '2,10p' "$0" >&2; exit 2 ;;
  esac
done

work=$(mktemp -d -t elasticflow-gpu.XXXXXX)
trap 'rm -rf "$work"' EXIT
python3 -m venv --system-site-packages "$work/venv"
python=$work/venv/bin/python
from=()
[ -z "$wheels" ] || from=(--no-index --find-links "$wheels")
# A torch of the image stays if its version fits: pip installs what is missing.
"$python" tests/gpu/packages.py > "$work/requirements.txt"
"$python" -m pip install --quiet "${from[@]}" -r "$work/requirements.txt"
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
[ -n "$is_dry" ] || "$python" -c "$sees_gpu" || { echo "torch sees no GPU here: nothing can be shown" >&2; exit 1; }
"$python" -m pip install --quiet --no-deps --no-build-isolation -e .
"$python" -m tests.gpu.measure "${rest[@]}"
