"""Programs of elasticflow as forks of one interpreter for all tests, which has imported what they need.

In each launch a fresh interpreter spends 0.4 s of CPU on the imports of the command, and the fork server more than 1 s on that
of torch; a writer of snapshots 0.4 s, the child process of `--deep` 2 s. Inside `forks()` each command, writer and such child
that `subprocess` starts is a fork that this process adopts: its child, then, like one that was exec'd. `run` and `resume` fork
the agent that waits ahead, and that agent its fork server, as the first thing that they do; that agent forks its writer, and
`verify` the processes of its launches. Agents of other nodes, and those that follow one that was killed, are forks of a server
that a command which trains forks before it has threads. Every process has descriptors, variables, signals, streams, command
line and session of its own (tests/test_forked.py compares them), and forks or execs all others as always.

What is lost: all launches of a process of pytest have one order of hashed strings and one list of installed packages, and the
modules that any of them needs are imported in each. `Project.fresh`, commands on terminals and hosts, and all that is no test,
have interpreters of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import NoReturn

ROOT = Path(__file__).parents[1]
WRITER = "elasticflow.snapshots.writer.main"
_CHECK = "elasticflow.runtime.process.device_check"
_STARTED = frozenset({"elasticflow", WRITER, _CHECK, "elasticflow.deep.child.main"})  # by tests
_OPTIONS = frozenset({"-P", "-X", "faulthandler"})
_AGENT, _SERVER = "elasticflow.launcher.agent.main", "elasticflow.launcher.fork_server.server"
_LAUNCH = "elasticflow.trials.launch_process"
_PROGRAMS = ("elasticflow.__main__", _AGENT, _SERVER, _LAUNCH, WRITER)
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
# As a launch sets them in every process that imports torch.
_OF_LAUNCHES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_LARGEST = 1 << 17  # bytes of a request
_MOST_DESCRIPTORS, _HIGH_DESCRIPTOR = 16, 200
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_INSTALLED = sys.path[2:]  # behind this file's folder and ours
_KEPT: list[object] = []  # what must stay as it is as long as the process lives


@contextmanager
def variables_put_back() -> Iterator[None]:
    """Put variables of `_READ_AT_START` back after the `with`: torch and others set some, and later launches would be no forks."""
    before = _read_at_start()
    try:
        yield
    finally:
        for name in _read_at_start().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _read_at_start() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}


@contextmanager
def forks() -> Iterator[None]:
    """Have the programs of `_STARTED` be forks, and children of this process, if `subprocess` starts them inside the `with`.

    On Linux alone; and a program whose variables only a fresh interpreter reads has such an interpreter.

    Source: CPython, Lib/subprocess.py, `Popen._execute_child`; 3.11 to 3.14.
    """
    module: Any = subprocess
    start_anew = module._fork_exec

    def start(argv: Sequence[str], *rest: Any) -> int:
        python, *words = map(os.fsdecode, argv)
        options, _, program = _parted(words)
        if sys.platform == "linux" and python == sys.executable and program in _STARTED:
            server, its_variables = _server()
            if _OPTIONS.issuperset(options) and _suit(_given(rest).variables, its_variables):
                return _adopted(server, words, rest)
        return int(start_anew(argv, *rest))

    module._fork_exec = start
    try:
        yield
    finally:
        module._fork_exec = start_anew


def _suit(variables: Mapping[str, str], its_variables: Mapping[str, str]) -> bool:
    """Return whether a server that started with *its_variables* has read what a fresh interpreter would read of *variables*."""
    return all(
        variables.get(name) in (its_variables.get(name), _OF_LAUNCHES.get(name))
        for name in {*its_variables, *variables}
        if name.startswith(_READ_AT_START)
    )


def _adopted(server: socket.socket, words: Sequence[str], rest: Sequence[Any]) -> int:
    """Return the process id of a fork of *server*, a child of this process, that runs Python's command line *words*.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER: a process below this one whose parent ends becomes its child.

    Args:
        rest: Arguments of `subprocess._fork_exec`, from the second on.
    """
    given = _given(rest)
    request = {
        "words": words,
        "variables": given.variables,
        "cwd": str(Path.cwd()) if rest[3] is None else os.fsdecode(rest[3]),
        "keep": given.keep,
        "leads": given.leads,
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "parent": os.getpid(),
    }
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        socket.send_fds(server, [json.dumps(request).encode()], [*given.streams, *given.keep])
        return int(server.recv(16))
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str], str]:
    """Return the options of Python's command line *words*, and the arguments and name of the module that it runs, if any."""
    if "-m" not in words[:-1]:
        return words, (), ""
    at = words.index("-m")
    return words[:at], words[at + 2 :], words[at + 1]


class _Given(NamedTuple):
    """What `subprocess` hands over to a process: descriptors, variables, if a session begins with it."""

    keep: list[int]
    streams: list[int]
    variables: dict[str, str]
    leads: bool


def _given(rest: Sequence[Any]) -> _Given:
    _, _, keep, _, variables, stdin, _, _, stdout, _, stderr, _, told, _, leads = rest[:15]
    streams = [number if each == -1 else each for number, each in enumerate((stdin, stdout, stderr))]
    environment = dict(os.fsdecode(each).split("=", 1) for each in variables)
    return _Given([each for each in keep if each != told], streams, environment, bool(leads))


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
            env={**environment, **_OF_LAUNCHES},
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
    require_job(ROOT / "jobs" / "mnist.toml")
    # Each launch would look through all installed packages, for 0.25 s.
    installed: Any = metadata
    installed.packages_distributions = cache(metadata.packages_distributions)
    metadata.packages_distributions()


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a program for each request, hand it over to the process that asks, and tell its process id."""
    finders = list(sys.meta_path)
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, _LARGEST, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        reaches_bucket = "AWS_ENDPOINT_URL" in request["variables"]
        if reaches_bucket:
            importlib.import_module("s3fs")  # nearly 1 s of CPU in each process that reaches a bucket
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            if os.getppid() != request["parent"]:  # which has ended
                os._exit(1)
            if not reaches_bucket:
                sys.meta_path[:] = finders  # `six`, of s3fs, has one of its own
            connection.send(str(os.getpid()).encode())
            _begin(request, descriptors)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the program that is asked for."""
    # Away from the numbers that they are to have.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH_DESCRIPTOR) for descriptor in descriptors]
    for number, descriptor in zip((0, 1, 2, *request["keep"]), high, strict=True):
        os.dup2(descriptor, number)
    os.chdir(request["cwd"])
    if request["leads"]:
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    options, arguments, program = _parted(request["words"])
    if "faulthandler" in options:
        faulthandler.enable()
    folder = () if "-P" in options else [request["cwd"]]
    _become(program, arguments, request["variables"], (0, 1, 2), keep=request["keep"], folder=folder)


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
    _close_all_but(keep)
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
        trains = program == _LAUNCH or (program == "elasticflow" and words[:1] in (["run"], ["resume"]))
        fork_helpers((_AGENT, _SERVER), (_LAUNCH, WRITER), _own_server(variables) if trains else None)
    end_with(partial(_run, program))


def _close_all_but(keep: Sequence[int]) -> None:
    last = 2
    for kept in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(last + 1, kept)
        last = kept


def _own_server(variables: Mapping[str, str]) -> socket.socket:
    """Return the connection to a server that is forked from this process while it has one thread, and ends with it."""
    from elasticflow.system.processes import die_with_parent

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        gc.freeze()
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        _close_all_but([theirs.fileno()])
        _is_named("tests.command_line", (), variables)
        _serve(theirs)
    theirs.close()
    return ours


def _run(program: str) -> None:
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def fork_helpers(first: Sequence[str], others: Sequence[str], server: socket.socket | None = None) -> None:
    """Have this process fork, as long as it has one thread, its first child if it is one of *first*, and any of *others*.

    Source: as `forks`.

    Args:
        server: Forks agents besides, if there is one.
    """
    module: Any = subprocess
    start_anew = module._fork_exec
    started = False

    def start(argv: Sequence[str], *rest: Any) -> int:
        nonlocal started
        is_first, started = not started, True
        python, *words = map(os.fsdecode, argv)
        options, arguments, program = _parted(words)
        is_forked = program in others or (is_first and program in first)
        if python != sys.executable or [*options] != ["-P"]:
            return int(start_anew(argv, *rest))
        if not is_forked or threading.active_count() > 1:
            if server is not None and program == _AGENT:
                return _adopted(server, words, rest)
            return int(start_anew(argv, *rest))
        if (pid := os.fork()) == 0:
            gc.freeze()  # what is garbage by now must not close the descriptors of others
            module._fork_exec = start_anew
            given = _given(rest)
            if given.leads:
                os.setsid()
            _become(program, arguments, given.variables, given.streams, keep=given.keep)
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
    gc.disable()
    _import_everything()
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(sys.argv[1])))
