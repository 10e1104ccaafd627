"""`nvidia-smi`, the tool of NVIDIA's driver: it tells about GPUs without making a context on them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOL = "nvidia-smi"


def query(
    fields: Sequence[str], limit_s: float, *, what: str = "--query-gpu", uuid: str = ""
) -> list[list[str]]:
    """Return the values of *fields*, a row for each GPU; numbers have no units, and lines of another form are left out.

    Args:
        fields: Names as in the tool's help of *what*, such as `--help-query-gpu`.
        limit_s: Seconds in which the tool has to answer: the driver may be in trouble.
        what: The tool's option for these fields.
        uuid: The GPU to ask about, as `uuid_of` gives it; empty: all GPUs.

    Raises:
        OSError: There is no tool here, or it cannot be started.
        subprocess.CalledProcessError: The tool failed; with its output.
        subprocess.TimeoutExpired: There was no answer in time.
    """
    command = [TOOL, f"{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [*command, f"--id={uuid}"] if uuid else command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=True,
    )
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.strip().splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def uuid_of(properties: Any) -> str:
    """Return a device's uuid in the tool's form, out of its properties as torch has them; empty if torch does not know it."""
    uuid = getattr(properties, "uuid", None)
    return "" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
