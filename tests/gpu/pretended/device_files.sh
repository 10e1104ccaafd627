#!/usr/bin/env bash
# Runs a command where the files of an NVIDIA driver are in /dev, as empty files; other processes do not see them.
# Without the right to mount, the command runs without the files.
#
#   device_files.sh GPUS COMMAND ...
set -euo pipefail
gpus=$1
shift
if [ "${1-}" = --mounted ]; then
  shift
  mount -t tmpfs tmpfs /mnt
  for path in /dev/*; do
    if [ -L "$path" ]; then
      cp -P "$path" /mnt/
    elif [ -e "$path" ]; then
      there=/mnt/${path##*/}
      if [ -d "$path" ]; then mkdir "$there"; else touch "$there"; fi
      mount --rbind "$path" "$there"
    fi
  done
  touch /mnt/nvidiactl /mnt/nvidia-uvm
  for ((number = 0; number < gpus; number++)); do touch "/mnt/nvidia$number"; done
  mount --move /mnt /dev
  exec "$@"
fi
if unshare --mount true 2>/dev/null; then
  exec unshare --mount --propagation private "$0" "$gpus" --mounted "$@"
fi
echo "no right to mount: without /dev/nvidia*" >&2
exec "$@"
