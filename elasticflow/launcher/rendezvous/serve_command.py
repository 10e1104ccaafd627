"""`elasticflow rendezvous serve`: a control store that outlives launches."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import TYPE_CHECKING

from elasticflow.errors import ANSWER_IS_NO, FINISHED, PortTakenError
from elasticflow.launcher.rendezvous.kept_keys import KeptKeys
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.rendezvous.token import is_loopback, open_to_all
from elasticflow.protocol.store_address import joined
from elasticflow.protocol.tcp_store import AWAY_S
from elasticflow.system.processes import leave_signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# Seconds between two looks at whether the store is still served.
_LOOK_S = 1.0


def serve_until_asked(
    host: str, port: int, token: str, say: Callable[[str], None], state: Path | None = None
) -> int:
    """Serve a store on *host*:*port* until a signal asks to end; return the exit code. Main thread only.

    Connections that are refused are told of once a minute at most.

    Args:
        host: Address to listen on; empty: all.
        port: 0 takes a free one.
        token: Secret that clients have to know; empty: any client may connect.
        state: Folder in which the keys are kept: a server that is started with it again continues, and runs with it.

    Raises:
        StorageError: that folder cannot be used.
        PortTakenError: the port is in use, or the address is not this machine's.
    """
    # Blocked before any thread is started, so that all of them leave the signals to `sigwait` below.
    signals = leave_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        listener = listen(host, port)
    except PortTakenError as error:
        raise PortTakenError(
            error.message.removeprefix("nodes.endpoint: "),
            "end the process that uses the port, or choose another one with --port",
        ) from error
    port = listener.getsockname()[1]
    with contextlib.ExitStack() as on_error:
        on_error.callback(listener.close)
        server = StoreServer(listener, token, None if state is None else KeptKeys(state))
        on_error.pop_all()
    if not token and not is_loopback(host):
        say(f"warning: {open_to_all(f'port {port} of this machine')}")
    kept = "" if state is None else f", kept in {state}"
    say(f"serving a rendezvous at {joined(host or socket.gethostname(), port)}{kept}; Ctrl-C ends it")
    asked = None
    while asked is None and server.is_serving:
        asked = signal.sigtimedwait(signals, _LOOK_S)
        # After a halt for longer than that (SIGSTOP, a suspended machine) CPython returns what lay in its memory.
        if asked is not None and asked.si_signo not in signals:
            asked = None
        if (refused := server.refusals.take()) is not None:
            say(str(refused))
    server.close()
    if asked is None:
        say(f"the store is gone: {server.failure or 'the thread that served it has ended'}")
        return ANSWER_IS_NO
    after = (
        ""
        if state is None
        else f": started again within {AWAY_S:.0f} s, the same command continues with all runs"
    )
    say(f"{signal.Signals(asked.si_signo).name}: the store is gone{after}")
    return FINISHED
