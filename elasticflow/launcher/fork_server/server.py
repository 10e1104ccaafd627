"""The process that has imported torch and the job's modules, and forks workers on request.

Run as `python -m elasticflow.launcher.fork_server.server FD PARENT_PID warm|cold`, exec'd from the agent's main thread. It
has one thread, ignores TERM, INT and HUP (a signal to the whole process group must not kill workers in the middle of a drain),
and dies with the agent. The messages over the socket FD are in `launcher/fork_server/protocol.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from elasticflow.launcher.fork_server.preload import (
    open_accelerator,
    preload,
    seed_imports,
    started_anew,
    unsafe_to_fork,
    warm_up,
    warm_up_compiler,
)
from elasticflow.launcher.fork_server.probe import Probe
from elasticflow.launcher.fork_server.protocol import (
    MESSAGES,
    Exited,
    Importing,
    MessageChannel,
    Prepare,
    Ready,
    Setup,
    Spawn,
    Started,
)
from elasticflow.launcher.fork_server.script import run_script
from elasticflow.launcher.fork_server.standby import Standbys
from elasticflow.launcher.fork_server.worker_process import end_with, run_entry_point, set_apart, take_over
from elasticflow.protocol import worker_environment
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import RefusedModule
from elasticflow.system.installation import module_command
from elasticflow.system.masking import mask_streams
from elasticflow.system.polling import readable
from elasticflow.system.processes import append_output_to, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.launcher.fork_server.probe import ProbeAnswer
    from elasticflow.launcher.fork_server.protocol import Message

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> NoReturn:
    """Serve until the agent closes the socket or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    _ignore_signals()
    # It marks what is forked from here; what is exec'd has the run's mark.
    os.environ.pop(worker_environment.LAUNCH_ID, None)
    channel = MessageChannel(connection)
    is_warm = sys.argv[3] == "warm"
    # Imports make much garbage and hardly any cycle of it: looking for cycles would take a sixth of their time.
    gc.disable()
    begun: tuple[Setup, Probe] | None = None
    for name in warm_up() if is_warm else ():
        # The probe wants torch, and asks it beside the imports that follow.
        if begun is None and name != "numpy" and readable([connection.fileno()], 0):
            begun = _begin(channel)
    setup, probe = begun or _begin(channel)
    answer = probe.answer()
    sys.path[:0] = setup.path
    if not is_warm:
        ready = _prepare(channel, setup, answer)
    else:
        if setup.script is None:
            seed_imports(setup.seed)
        warm_up_compiler(has_gpu=answer.has_gpu)
        unsafe = open_accelerator(has_gpu=answer.has_gpu)
        if unsafe is None:
            ready = _let_child_serve(channel, setup, answer)
        else:  # not the job's doing: torch itself, or an import that this Python makes at its start
            setup = replace(setup, start_method="spawn")
            ready = _ready((RefusedModule("torch", started_anew(unsafe)),), answer, shares_imports=False)
    _serve(channel, setup, ready)


def _begin(channel: MessageChannel) -> tuple[Setup, Probe]:
    """Wait for the setup; take over its variables and its log, and start the child that asks torch."""
    setup = _wait_for_setup(channel)
    os.environ.update(setup.environment)
    if setup.log:
        _move_output_to(setup.log)
    mask_streams()
    return setup, Probe(setup.arguments)


def _move_output_to(log: str) -> None:
    """Append this process' output to *log*, including what it has printed so far."""
    size = os.fstat(1).st_size
    text = os.pread(1, size, 0) if size else b""
    os.ftruncate(1, 0)
    append_output_to(log)
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


def _let_child_serve(channel: MessageChannel, setup: Setup, answer: ProbeAnswer) -> Ready:
    """Have a child import the job's modules and serve; return only if no worker must be forked from it.

    This process stays as it is, with torch imported and no threads. If a module of the job starts threads that workers
    would miss, or opens the accelerator, the child ends, and workers are forked from here and import those modules
    for themselves; torch they have.
    """
    gc.freeze()  # shared pages stay shared: the collector no longer writes into them
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(read)
        ready = _prepare(channel, setup, answer)
        if not ready.shares_imports:
            os.write(write, MESSAGES.encode(ready).encode())
            os._exit(0)
        os.close(write)
        _serve(channel, setup, ready)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read()
    if not message:
        channel.connection.close()
    _, status = os.waitpid(child, 0)
    if not message:
        _end_as(os.waitstatus_to_exitcode(status))
    told = MESSAGES.decode(message)
    assert isinstance(told, Ready)
    return told


def _prepare(channel: MessageChannel, setup: Setup, answer: ProbeAnswer) -> Ready:
    """Import what the start method allows; return the message that tells the agent."""
    refused: list[RefusedModule] = []
    shares_imports = setup.start_method == "fork"
    if shares_imports:

        def tell(name: str) -> None:
            channel.send(Importing(name))

        refused = preload(setup.modules, setup.path, tell, has_gpu=answer.has_gpu)
        shares_imports = unsafe_to_fork(has_gpu=answer.has_gpu) is None
    return _ready(refused, answer, shares_imports=shares_imports)


def _ready(refused: Sequence[RefusedModule], answer: ProbeAnswer, *, shares_imports: bool) -> Ready:
    return Ready(tuple(refused), shares_imports, answer.has_gpu, answer.options, answer.refusal)


def _serve(channel: MessageChannel, setup: Setup, ready: Ready) -> NoReturn:
    _ignore_signals()  # the job's modules may have changed that at import
    gc.collect()  # of what came since it was frozen before: not of torch
    gc.freeze()
    gc.enable()
    channel.send(replace(ready, pid=os.getpid()))
    Server(channel, setup).serve()


def _end_as(exit_code: int) -> NoReturn:
    """Exit in the way of the child that served."""
    if exit_code < 0:
        if -exit_code in _IGNORED:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code if exit_code >= 0 else 1)


def _wait_for_setup(channel: MessageChannel) -> Setup:
    """Return the agent's first message; exits if the agent is gone."""
    while not (messages := channel.read()):
        if messages is None:
            os._exit(0)
    assert isinstance(messages[0], Setup)
    return messages[0]


def _ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


class Server:
    """Starts a worker for each request of the agent at the other end of *channel*, and reports each exit, until the agent is gone."""

    def __init__(self, channel: MessageChannel, setup: Setup) -> None:
        self._channel, self._setup = channel, setup
        self._standbys = Standbys(setup.start_method, channel.connection)

    def serve(self) -> NoReturn:
        """Serve; ends this process when the agent is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up to be written
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        agent = self._channel.connection.fileno()
        while True:
            ready = readable((agent, wake_read, *self._standbys.descriptors()))
            for report in self._standbys.read(ready):
                self._channel.send(report)
            if wake_read in ready:
                os.read(wake_read, 4096)
                for exited in reap():
                    self._channel.send(self._standbys.ended(exited.pid, exited.code) or exited)
            if agent in ready:
                messages = self._channel.read()
                if messages is None:
                    os._exit(0)
                for message in messages:
                    self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Spawn():
                pid = self._standbys.call(message) or self._start_worker(message)
                self._channel.send(Started(message.local_rank, pid))
            case Prepare():
                if (report := self._standbys.start(message)) is not None:
                    self._channel.send(report)
            case _:
                raise AssertionError(f"{message} goes the other way")

    def _start_worker(self, request: Spawn) -> int:
        """Return the process id of a new worker, which runs the entry point; SIGTERM is blocked in it until `worker.join`."""
        # Asked for before: a child may run first when its parent is dead.
        server = os.getpid()
        # Before the fork: this process ignores SIGTERM, and so does the child until it runs. A drain that came
        # meanwhile would be lost; blocked, it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            end_with(lambda: self._become_worker(server, request))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return pid

    def _become_worker(self, server: int, request: Spawn) -> None:
        """Turn this forked child into a worker and run the entry point."""
        die_with_parent(server)
        set_apart()
        self._channel.connection.close()
        self._standbys.disown()
        take_over(request)
        if self._setup.start_method == "spawn":
            program = "elasticflow.launcher.fork_server.worker_process"
            run = self._setup.entry_point if self._setup.script is None else to_json(self._setup.script)
            os.execv(sys.executable, module_command(program, str(server), run, options=("-u",)))  # noqa: S606  # argv of our own making
        if self._setup.script is not None:
            run_script(self._setup.script)
        run_entry_point(self._setup.entry_point)


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


if __name__ == "__main__":
    main()
