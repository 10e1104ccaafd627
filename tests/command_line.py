"""Commands (`python -m elasticflow ...`) as forks of one interpreter for all tests, which has imported what they need.

In each launch a fresh interpreter spends 0.4 s of CPU on the imports of the command, and the fork server more than 1 s on that
of torch. Here `run` and `resume` fork the agent that waits ahead, and that agent its fork server, where otherwise they exec
them, as the first thing that they do. That agent forks its writer, and `verify` the processes of its launches. Every process
is its parent's child, with descriptors, variables, signals, streams, command line and session of its own (tests/test_forked.py
compares them), and forks or execs all others as always: workers, agents of other nodes, and agents that follow one that was
killed, with their fork servers and writers.

What is lost: all launches of a process of pytest have one order of hashed strings, and the modules that any of them needs are
imported in each. `Project.fresh`, commands on terminals and hosts, and all that is no test, have interpreters of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import logging
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
_HELPERS = ("elasticflow.launcher.agent.main", "elasticflow.launcher.fork_server.server")
_OTHERS = ("elasticflow.trials.launch_process", "elasticflow.snapshots.writer.main")
_PROGRAMS = ("elasticflow.__main__", *_HELPERS, *_OTHERS)
_NOT_IMPORTED = (
    "elasticflow.runtime",
    "elasticflow.deep",
    "elasticflow.sinks",
)  # beyond what every worker needs
# Variables that an interpreter and its libraries read when they start, and never again.
_READ_AT_START = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA", "NVIDIA", "NCCL", "GLOO"),
)
_LARGEST = 1 << 17  # bytes of a request


class Command:
    """A command that was forked; it has what tests need of `subprocess.Popen`.

    Attributes:
        returncode: Its exit code, negative for a signal; None as long as neither `poll` nor `wait` has seen its end.
    """

    def __init__(self, pid: int, end: int) -> None:
        self.pid, self._end = pid, end
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after *timeout* seconds.
        """
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired("elasticflow", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its exit code is under way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = int(os.read(self._end, 16))
            os.close(self._end)
        return self.returncode


def start(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], stdout: IO[str], stderr: IO[str]
) -> Command | None:
    """Start a command in a session of its own, without input; return None if only a fresh interpreter suits *environment*."""
    server, its_environment = _server()
    if _read_at_start(environment) != _read_at_start(its_environment):
        return None
    request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
    read, write = os.pipe()
    socket.send_fds(server, [json.dumps(request).encode()], [stdout.fileno(), stderr.fileno(), write])
    os.close(write)
    return Command(int(server.recv(16)), read)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(_READ_AT_START)}


@cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """Return the connection to this process' server, which ends with it, and the variables that it started with."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # As a fork server has them.
            env={**environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # called first
    return ours, environment


def _import_everything() -> None:
    """Import what a command, an agent and a fork server import, but not the programs; and make pydantic's validators."""
    import elasticflow
    from elasticflow.jobfile.load import require_job
    from elasticflow.launcher.fork_server.preload import warm_up

    for _ in warm_up():
        pass
    for module in pkgutil.walk_packages(elasticflow.__path__, "elasticflow."):
        if module.name not in _PROGRAMS and not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    require_job(ROOT / "jobs" / "mnist.toml").job.model_dump()


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a command for each request, and write its exit code into the pipe that came with it."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    ends: dict[int, int] = {}
    while True:
        ready = select.select([connection.fileno(), wake_read], [], [])[0]
        if wake_read in ready:
            os.read(wake_read, 4096)
            while ends and (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(ends[reaped[0]], str(os.waitstatus_to_exitcode(reaped[1])).encode())
                os.close(ends.pop(reaped[0]))
        if connection.fileno() in ready:
            message, descriptors, *_ = socket.recv_fds(connection, _LARGEST, 3)
            if not message:
                os._exit(0)
            stdout, stderr, end = descriptors
            if (pid := os.fork()) == 0:
                os.setsid()
                request = json.loads(message)
                os.chdir(request["cwd"])
                words, variables = request["arguments"], request["environment"]
                _become("elasticflow", words, variables, (0, stdout, stderr), folder=[request["cwd"]])
            ends[pid] = end
            os.close(stdout)
            os.close(stderr)
            connection.send(str(pid).encode())


def _become(
    program: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    streams: Sequence[int],
    *,
    keep: Sequence[int] = (),
    folder: Sequence[str] = (),
) -> NoReturn:
    """Be `python -m PROGRAM WORDS`, started by exec: of the process that was forked, nothing but modules is left."""
    import numpy as np
    import torch

    from elasticflow.launcher.fork_server.worker_process import end_with

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    last = 2
    for kept in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(last + 1, kept)
        last = kept
    for kept in keep:
        os.set_inheritable(kept, True)
    signal.set_wakeup_fd(-1)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # by the variables
    # Each interpreter draws its own numbers as long as nobody seeds.
    np.random.seed()  # noqa: NPY002
    torch.default_generator.seed()
    sys.argv[1:] = words
    sys.path[:] = [*folder, str(ROOT), *_INSTALLED]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    is_raw = bool(variables.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)):
        _KEPT.append(getattr(sys, name))  # with what it has not written
        text: io.TextIOWrapper = getattr(sys, f"__{name}__")
        raw: Any = io.FileIO(number, "w", closefd=False)
        wrapped = io.TextIOWrapper(
            raw if is_raw else io.BufferedWriter(raw),
            text.encoding,
            text.errors,
            line_buffering=text.line_buffering and not is_raw,
            write_through=is_raw,
        )
        setattr(sys, name, wrapped)
    if _is_named(program, words, variables):
        _fork_helpers()
    end_with(partial(_run, program))


def _run(program: str) -> None:
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork_helpers() -> None:
    """Have this process fork its first child, if that is an agent or a fork server, its writers, and the launches of trials.

    Source: CPython, Lib/subprocess.py, `Popen._execute_child`; 3.11 to 3.14.
    """
    module: Any = subprocess
    start_anew = module._fork_exec
    started = False

    def start(argv: Sequence[str], *rest: Any) -> int:
        nonlocal started
        is_first, started = not started, True
        python, isolated, _, program, *words = (*map(os.fsdecode, argv), *[""] * 4)
        is_forked = program in _OTHERS or (is_first and program in _HELPERS)
        if (python, isolated) != (sys.executable, "-P") or not is_forked or threading.active_count() > 1:
            return int(start_anew(argv, *rest))
        _, _, keep, _, variables, stdin, _, _, stdout, _, stderr, _, told, _, new_session = rest[:15]
        if (pid := os.fork()) == 0:
            gc.freeze()  # what is garbage by now must not close the descriptors of others
            module._fork_exec = start_anew
            if new_session:
                os.setsid()
            environment = dict(os.fsdecode(each).split("=", 1) for each in variables)
            given = enumerate((stdin, stdout, stderr))
            streams = [number if each == -1 else each for number, each in given]
            kept = [each for each in keep if each != told]
            _become(program, words[: len(argv) - 4], environment, streams, keep=kept)
        return pid

    module._fork_exec = start


def _is_named(program: str, words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Give this process, and those that it forks, the command line and variables that others see; False if the kernel refuses.

    Source: prctl(2), PR_SET_MM_MAP; proc(5), `/proc/PID/stat`.
    """
    if sys.platform != "linux":
        return False
    command = [sys.executable, *(("-P",) if program != "elasticflow" else ()), "-m", program, *words]
    texts = [
        b"".join(os.fsencode(each) + b"\0" for each in each_list)
        for each_list in (command, [f"{key}={value}" for key, value in variables.items()])
    ]
    _KEPT.append(block := ctypes.create_string_buffer(b"".join(texts)))
    begin = ctypes.addressof(block)
    middle = begin + len(texts[0])
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code, data, heap, stack = fields[23:25], fields[42:44], fields[44], fields[25]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = map(
        int, (*code, *data, heap, libc.sbrk(0), stack, begin, middle, middle, middle + len(texts[1]))
    )
    layout = struct.pack("=11QQIi", *places, 0, 0, -1)
    set_mm, whole_map = 35, 14
    return bool(libc.prctl(set_mm, whole_map, layout, len(layout), 0) == 0)


if __name__ == "__main__":
    _INSTALLED = sys.path[2:]  # behind this file's folder and ours
    _KEPT: list[object] = []  # what must stay as it is as long as the process lives
    gc.disable()
    _import_everything()
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(sys.argv[1])))
