"""The token that all machines of a run share: read from the environment or a file, or made by the launch.

Never from a command line, which every user of a machine may read.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.errors import TokenError
from elasticflow.protocol.handshake import TOKEN
from elasticflow.protocol.store_address import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.compiler.plan.launch_plan import LaunchPlan

# Characters: less may be guessed.
_SHORTEST = 16
_MAKE = "one is made by: openssl rand -hex 32"


def given_token(file: str | None, root: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token of the environment, else that in *file*; empty: there is none.

    Args:
        file: `nodes.token_file`, or `--token-file`; `~` is the user's home.
        root: Folder that *file* is relative to.

    Raises:
        TokenError: the file cannot be read, or the given text is no token.
    """
    if TOKEN in environment:
        return _checked(environment[TOKEN], f"the variable {TOKEN}")
    if file is None:
        return ""
    path = root / Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TokenError(
            f"the run's token cannot be read: {path}: {reason}",
            f"put the same file there on every machine, or set {TOKEN}; {_MAKE}",
        ) from error
    return _checked(text, str(path))


def _checked(text: str, place: str) -> str:
    token = text.strip()
    if len(token) < _SHORTEST or len(token.split()) != 1:
        what = "is empty" if not token else f"is no word of {_SHORTEST} characters or more"
        raise TokenError(f"the token in {place} {what}", _MAKE)
    return token


def new_token() -> str:
    """Return a new random token."""
    return os.urandom(32).hex()


def open_port_warning(plan: LaunchPlan, token: str) -> str | None:
    """Return a warning if this launch serves its keys to every user who reaches its port, else None."""
    if plan.endpoint is None or plan.nodes_max == 1 or plan.is_store_outside or token:
        return None
    host, port = split(plan.endpoint)
    return None if is_loopback(host) else open_to_all(f"port {port} of this machine")


def open_to_all(place: str) -> str:
    """Return the warning about *place*, where no token is asked for."""
    return (
        f"no token: who reaches {place} can take part in the run, and have its machines run code; "
        f"set {TOKEN}, or nodes.token_file, on all machines (elasticflow guide machines)"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
