"""Children that a worker's own code forks: `os.fork`, `multiprocessing`, loaders that are not elasticflow's.

A fork has all of its parent: signal handlers, sockets, locks, and the command line by which it is known. With the
worker's handlers, a child that `multiprocessing` ends by SIGTERM would wait for the end of a step; a child that outlives
its worker would hold the worker's sockets and locks; a child that collected its worker's garbage could wait for ever for
threads that it does not have. So a child gets the default handlers, its connections are cut, what it inherits is not
collected, and the kernel ends it when its worker ends. Programs started by exec inherit none of this.
"""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from elasticflow.system.processes import die_with_parent, set_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "worker-child"
"""What the kernel calls such a child: its command line is its worker's."""

_USUAL: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class _Parent:
    """Resources of a forking process that its children must not keep.

    Attributes:
        pid: The process; None in its children.
        thread: The process' main thread; the kernel ends a child with the thread that forked it.
        is_lifeline: Children end with it.
        descriptors: The process' connections and locks: device and inode by descriptor.
        actions: Called in each child.
    """

    def __init__(self, pid: int | None, thread: int) -> None:
        self.pid, self.thread = pid, thread
        self.is_lifeline = False
        self.handlers: dict[signal.Signals, Any] = {}
        self.descriptors: dict[int, tuple[int, int]] = {}
        self.actions: list[Callable[[], None]] = []


_parent = _Parent(None, 0)
_is_registered = False
# State before the fork, of threads that fork at this moment.
_masks: dict[int, set[int | signal.Signals]] = {}


def name_children() -> None:
    """Have children that this process forks from now on be called `NAME`; called in its main thread."""
    global _parent, _is_registered  # noqa: PLW0603  # hooks cannot be taken back, and children inherit them
    if _parent.pid != os.getpid():
        _parent = _Parent(os.getpid(), threading.get_ident())
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_enter)


def set_apart() -> None:
    """Have children that this process forks from now on end with it, and lose all that `own` and others name.

    A child of another thread than the main one lives on, since the kernel would end it with that thread. Other programs live
    on, too.
    """
    name_children()
    _parent.is_lifeline = True


def own_handler(number: signal.Signals, handler: Any) -> None:
    """Have children handle signal *number* in the usual way where their handler is *handler*."""
    _parent.handlers[number] = handler


def own(*descriptors: int) -> None:
    """Have children lose *descriptors*; one that is closed here, and opened as another file, is theirs."""
    for descriptor in descriptors:
        status = os.fstat(descriptor)
        _parent.descriptors[descriptor] = (status.st_dev, status.st_ino)


@contextmanager
def own_sockets() -> Iterator[None]:
    """Have children lose the sockets that are opened inside this block: libraries do not tell which they open."""
    before = _sockets()
    yield
    _parent.descriptors.update(_sockets().items() - before.items())


def call_in_children(action: Callable[[], None]) -> None:
    """Have *action* called in each child, right after the fork."""
    _parent.actions.append(action)


def end_children() -> None:
    """Ask the children that `multiprocessing` has started here to end; for use where this process ends without its exit handlers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or _parent.pid != os.getpid():  # a child's copy of that list names its siblings
        return
    for child in processes.active_children():
        with suppress(Exception):  # this process ends, whatever becomes of them
            child.terminate()


def _sockets() -> dict[int, tuple[int, int]]:
    """Return device and inode of each open socket by its descriptor; other threads may open and close sockets meanwhile."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208  # numbers, not paths
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = (status.st_dev, status.st_ino)
    return found


def _hold_signals() -> None:
    """Have signals wait that come to the child before its handlers are the usual ones."""
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _USUAL)


def _release_signals() -> None:
    """Restore the signal mask: code that blocks a signal over a fork leaves the signal to the child."""
    if (mask := _masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _enter() -> None:
    """Make this process, which was forked a moment ago, one of its own."""
    # Finalizers would act for the parent: that of a process group of gloo waits for its threads, which no child has (torch 2.13).
    gc.freeze()
    parent, _parent.pid = _parent.pid, None
    try:
        if parent is not None:  # else a child has forked it
            _leave_parent(parent)
    finally:
        _release_signals()


def _leave_parent(parent: int) -> None:
    for number, handler in _parent.handlers.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, _USUAL[number])
    for action in _parent.actions:
        action()
    _cut(_parent.descriptors)
    set_name(NAME)
    # The forking thread is this process's main thread, under the same number.
    is_of_main_thread = threading.get_ident() == _parent.thread
    if _parent.is_lifeline and sys.platform == "linux" and is_of_main_thread and not _is_to_be_replaced():
        die_with_parent(parent)


def _is_to_be_replaced() -> bool:
    """Return whether `subprocess` has forked, which calls hooks for its `preexec_fn`: another program may live on."""
    frame = sys._getframe(1)  # noqa: SLF001  # nothing else tells who forks
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "subprocess"


def _cut(descriptors: dict[int, tuple[int, int]]) -> None:
    """Put nothing in the place of *descriptors*: their objects may close them, or use them, and meet no other file."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, inode in descriptors.items():
        with suppress(OSError):
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) == inode:
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
