"""Finds the libraries that started this process' threads, and tells whether a forked child can do without them.

A forked child has only the thread that forked. Some libraries make theirs anew there; others wait for ever for
threads that are gone. A thread does not say whose it is: most have the process's name. But glibc notes at the end of its
stack which function it began with; for the C++ runtime's start function, a waiting thread has its library's code on its stack.
The kernel lets this process read both. What lies on a stack may also be left from another thread, whose stack it was.

Source: proc(5), `/proc/PID/task/TID/syscall`, whose last two fields are the stack pointer and the program counter of
a thread that is blocked in the kernel; glibc 2.36, nptl/descr.h: `struct pthread`, of 2304 bytes on x86-64, ends the
mapping of a thread's stack, and its last code address is `start_routine`.
"""

from __future__ import annotations

import platform
import re
import struct
import threading
from bisect import bisect
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

_TASKS = Path("/proc/self/task")
_RUNTIME = re.compile(
    r"(libc|libpthread|libstdc\+\+|libgcc_s|libm|ld-linux[\w-]*|libgcompat|ld-musl[\w-]*)[.-]"
)
_PYTHON = re.compile(r"(lib)?python\d")
# How long a thread may run before it waits, and what of its stack is read.
_LIMIT_S, _PAUSE_S = 0.5, 0.01
_STACK_BYTES = 1 << 16
_DESCRIPTOR_BYTES = 2304


class ForkSafeLibrary(NamedTuple):
    """A library whose threads a forked child does not miss.

    Attributes:
        file: Matches the name of the shared library.
        distribution: Distribution that installs it; None: several do.
        since: First version of that of which it is known.
    """

    file: re.Pattern[str]
    distribution: str | None = None
    since: tuple[int, ...] = ()


FORK_SAFE = (
    # Its pools, and jemalloc's thread, are made anew in the child.
    ForkSafeLibrary(re.compile(r"libarrow\.so"), "pyarrow", (12,)),
    # It ends its threads before a fork, and makes them anew after it.
    ForkSafeLibrary(re.compile(r"lib(scipy_)?openblas")),
    # The child works without its own, one text at a time.
    ForkSafeLibrary(re.compile(r"tokenizers\.abi3\.so"), "tokenizers", (0, 13)),
)


class _Mapping(NamedTuple):
    start: int
    end: int
    is_code: bool
    file: str


def missed_in_a_child() -> str | None:
    """Return the libraries whose threads a forked child of this process would miss, as words; None if there are none."""
    if not _TASKS.is_dir():
        return "threads" if threading.active_count() > 1 else None
    missed = set()
    for thread in _other_threads():
        libraries = _libraries_of(thread)
        if libraries is None:  # it has ended
            continue
        missed |= (
            {library for library in libraries if not _is_safe(library)} if libraries else {"unknown code"}
        )
    if not missed:
        return None
    names = sorted("Python" if _PYTHON.match(name) else name for name in missed)
    return f"threads of {' and '.join(dict.fromkeys(names))}"


def _other_threads() -> list[int]:
    own = threading.get_native_id()
    return [int(path.name) for path in _TASKS.iterdir() if int(path.name) != own]


def _is_safe(library: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    for known in FORK_SAFE:
        if known.file.match(library):
            if known.distribution is None:
                return True
            with suppress(PackageNotFoundError):
                numbers = re.findall(r"\d+", version(known.distribution))
                return tuple(map(int, numbers[:3])) >= known.since
    return False


def _libraries_of(thread: int) -> set[str] | None:
    """Return the files of the libraries on a thread's stack; empty if that cannot be told, None if it has ended."""
    for _ in attempts(_LIMIT_S, _PAUSE_S):
        try:
            call = (_TASKS / str(thread) / "syscall").read_text().split()
        except FileNotFoundError:
            return None
        except OSError:  # not every container lets a process read it
            return set()
        if len(call) > 2:
            return _libraries_on_stack(thread, int(call[-2], 16))
    return set()


def _libraries_on_stack(thread: int, pointer: int) -> set[str]:
    """Return the library that began the thread whose stack *pointer* is in, or all that may have."""
    mappings = _mappings()
    starts = [mapping.start for mapping in mappings]

    def mapping_of(address: int) -> _Mapping | None:
        index = bisect(starts, address) - 1
        return mappings[index] if index >= 0 and address < mappings[index].end else None

    stack = mapping_of(pointer)
    if stack is None:
        return set()
    end = _words(max(pointer, stack.end - _DESCRIPTOR_BYTES), stack.end)
    # A descriptor holds the thread's number; without the number this is no descriptor, or another C library's.
    if platform.machine() == "x86_64" and any(word & 0xFFFFFFFF == thread for word in end):
        began_with = _files_of(end, mapping_of)[-1:]
        if began_with and not _RUNTIME.match(began_with[0]):
            return set(began_with)
    found = _files_of(_words(pointer, min(stack.end, pointer + _STACK_BYTES)), mapping_of)
    return {file for file in found if not _RUNTIME.match(file)}


def _words(start: int, end: int) -> list[int]:
    """Return the words in a part of this process' memory; none that cannot be read."""
    with suppress(OSError), Path("/proc/self/mem").open("rb", 0) as memory:
        memory.seek(start)
        data = memory.read(end - start)
        return [word for (word,) in struct.iter_unpack("@N", data[: len(data) // 8 * 8])]
    return []


def _files_of(words: list[int], mapping_of: Callable[[int], _Mapping | None]) -> list[str]:
    """Return the file of each of *words* that is an address of code, in order."""
    mappings = map(mapping_of, words)
    return [mapping.file for mapping in mappings if mapping is not None and mapping.is_code]


def _mappings() -> list[_Mapping]:
    mappings = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, *rest = line.split(None, 5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        name = rest[3].rpartition("/")[2] if len(rest) > 3 else ""
        mappings.append(_Mapping(start, end, "x" in rights and bool(name) and not name.startswith("["), name))
    return mappings
