"""The process that has imported torch and the job's modules, and forks workers on request.

Run as `python -m elasticflow.launcher.fork_server.server FD PARENT_PID`, exec'd from the agent's main thread. It has one
thread, ignores TERM, INT and HUP (a signal to the whole process group must not kill workers in the middle of a drain),
and dies with the agent. The messages over the socket FD are in `launcher/fork_server/protocol.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from elasticflow.launcher.fork_server.preload import preload, unsafe_to_fork, warm_up
from elasticflow.launcher.fork_server.protocol import Exited, MessageChannel, Ready, Setup, Spawn, Started
from elasticflow.launcher.fork_server.torchrun_arguments import (
    ArgumentsReader,
    TorchrunOptions,
    TorchrunRefusedError,
)
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from elasticflow.protocol.messages import RefusedModule

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> NoReturn:
    """Serve until the agent closes the socket or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    _ignore_signals()
    channel = MessageChannel(connection)
    setup = _wait_for_setup(channel)
    sys.path[:0] = setup.path
    start_method = setup.start_method
    refused: tuple[RefusedModule, ...] = ()
    if start_method == "fork":
        warm_up(setup.seed)
    # It runs beside the imports of the job's modules, and is forked before them: with threads of theirs it might hang.
    reader = ArgumentsReader(setup.arguments) if setup.arguments else None
    if start_method == "fork":
        refused = tuple(preload(setup.modules, setup.path))
        start_method = "spawn" if unsafe_to_fork() else "fork"
        _ignore_signals()  # the job's modules may have changed that at import
    options, refusal = _options(reader)
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector no longer writes into them
    channel.send(Ready(refused, options, refusal))
    serve(channel, setup.entry_point, start_method)


def _options(reader: ArgumentsReader | None) -> tuple[TorchrunOptions | None, str]:
    try:
        return (None if reader is None else reader.options()), ""
    except TorchrunRefusedError as error:
        return None, error.reason


def _wait_for_setup(channel: MessageChannel) -> Setup:
    """Return the agent's first message; leaves the process when the agent is gone."""
    while not (messages := channel.read()):
        if messages is None:
            os._exit(0)
    assert isinstance(messages[0], Setup)
    return messages[0]


def _ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def serve(channel: MessageChannel, entry_point: str, start_method: str) -> NoReturn:
    """Fork a worker for each request and report each exit, until the agent is gone."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up to be written
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel.connection.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            for report in reap():
                channel.send(report)
        if channel.connection.fileno() in ready:
            messages = channel.read()
            if messages is None:
                os._exit(0)
            for message in messages:
                assert isinstance(message, Spawn)
                channel.send(
                    Started(message.local_rank, fork_worker(channel, message, entry_point, start_method))
                )


def fork_worker(channel: MessageChannel, request: Spawn, entry_point: str, start_method: str) -> int:
    """Return the process id of a new worker, which runs the entry point; SIGTERM is blocked in it until `worker.join`."""
    # Asked for before: a child may run first when its parent is dead.
    server = os.getpid()
    # Before the fork: this process ignores SIGTERM, and so does the child until it runs. A drain that came
    # meanwhile would be lost; blocked, it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid == 0:
        become_worker(server, channel.connection, request, entry_point, start_method)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return pid


def reap() -> list[Exited]:
    """Return a report for each child that has ended; signals as negative codes."""
    reports: list[Exited] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reports
        if pid == 0:
            return reports
        reports.append(Exited(pid, os.waitstatus_to_exitcode(status), time.time()))


def become_worker(
    server: int, connection: socket.socket, request: Spawn, entry_point: str, start_method: str
) -> NoReturn:
    """Turn this forked child into a worker and run the entry point; never returns.

    SIGTERM is blocked when it is called: a drain asked for before `worker.join` has its handler up must wait, not
    kill; join unblocks it. The worker leads a session of its own, so that Ctrl-C reaches the supervisor only and one signal to
    the session reaches its loader processes too.
    """
    code = 1
    try:
        die_with_parent(server)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        connection.close()
        os.setsid()
        for descriptor, path in ((1, request.stdout), (2, request.stderr)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, descriptor)
            os.close(opened)
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # stacks of a hang, also of one in an import
        os.environ.update(request.environment)
        if start_method == "spawn":
            os.execv(  # noqa: S606  # argv of our own making
                sys.executable,
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "elasticflow.launcher.fork_server.spawned",
                    str(server),
                    entry_point,
                ],
            )
        sys.argv = [entry_point]
        runpy.run_path(entry_point, run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  the last frame of a process: everything is shown, then it ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Never unwind into the server's own frames, and never run torch's destructors.
        os._exit(code)


if __name__ == "__main__":
    main()
