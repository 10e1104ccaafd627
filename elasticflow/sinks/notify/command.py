"""Runs a command with a message. As `python -m`, with the id of its parent, this module becomes the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow.sinks.sink import SinkError
from elasticflow.system.installation import module_command
from elasticflow.system.masking import mask_of
from elasticflow.system.processes import die_with_parent, signal_or_code

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NOT_FOUND = 127  # the exit code of a shell for it
_VARIABLES = ("event", "text", "job", "run_id", "host", "folder", "step", "error", "exit_code", "next")


def run(command: Sequence[str], message: dict[str, Any], folder: Path, timeout_s: float) -> None:
    """Run *command* in *folder*, with *message* on its standard input; print its output, without secrets.

    The command's process ends with this one. After *timeout_s* it is killed, together with the processes it has
    started.

    Raises:
        SinkError: the command cannot be run, exited with a code other than 0, or did not exit in time.
    """
    # Unknown values are empty.
    values = {name: "" if message[name] is None else str(message[name]) for name in _VARIABLES}
    process = subprocess.Popen(
        module_command("elasticflow.sinks.notify.command", str(os.getpid()), *command),
        cwd=folder,
        env={**os.environ, **{f"ELASTICFLOW_{name.upper()}": value for name, value in values.items()}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    mask = mask_of(os.environ)
    try:
        output, _ = process.communicate(json.dumps(message).encode() + b"\n", timeout_s)
    except subprocess.TimeoutExpired:
        raise SinkError(f"{command[0]} has not ended within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
    lines = mask.text(output.decode(errors="replace")).splitlines()
    if lines:
        sys.stdout.write("".join(f"{command[0]}: {line}\n" for line in lines))  # the follower's log
        sys.stdout.flush()
    if process.returncode != 0:
        said = f": {lines[-1].strip()}" if lines else ""
        raise SinkError(f"{command[0]}: {signal_or_code(process.returncode)}{said}")


def main() -> None:
    """Become the command, which ends with its parent: `PARENT_PID COMMAND...`."""
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # the follower ignores them
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"it cannot be run: {error.strerror}\n")
        sys.exit(_NOT_FOUND)


if __name__ == "__main__":
    main()
