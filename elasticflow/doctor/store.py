"""Checks that the stores of snapshots and of the run folder behave as the commit protocol requires."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import secrets
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.doctor.check import Topic
from elasticflow.errors import StorageError
from elasticflow.observe.terminal.formats import size, span
from elasticflow.run_folder import RUNS, RunFolder, snapshot_place
from elasticflow.storage import urls
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage
from elasticflow.system.kernel_files import file_system_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.doctor.check import CheckResult, Needs

_TOPIC = Topic("storage")
_PATIENCE = Patience(total_s=5.0)
_LIBRARIES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "sftp": "asyncssh", "http": "aiohttp"}
# On these file systems, locks and clocks depend on a server.
_NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")
_LITTLE, _TOO_LITTLE = 10**9, 10**8
_SLOW_S, _SKEW_S = 0.5, 60.0


def stores(needs: Needs) -> Iterator[CheckResult]:
    """Yield the behaviour of the places of the run folder and the snapshots; every probe file is removed again."""
    runs = needs.root / RUNS
    yield from _folder("run folder", runs)
    uri = None if needs.job is None else needs.job.snapshots.uri
    if uri is None or needs.job is None:
        return
    snapshot_uri, _ = snapshot_place(uri, RunFolder(runs / "doctor" / "doctor"), needs.root)
    storage = Storage(snapshot_uri, needs.job.snapshots.options, patience=_PATIENCE)
    if storage.is_local:
        yield from _folder("snapshots", storage.local_path())
        return
    extra = (urls.package_for(urls.protocol_of(snapshot_uri)) or "").partition("[")[2].rstrip(']"')
    library = _LIBRARIES.get(extra)
    if library is not None and importlib.util.find_spec(library) is None:
        meaning = f"snapshots cannot be written to {storage.uri}: {library} is not installed"
        remedy = f'pip install "elasticflow[{extra}]"'
        yield _TOPIC.problem("snapshots", storage.uri, meaning, remedy)
        return
    yield from _remote(storage)


def _folder(name: str, wanted: Path) -> Iterator[CheckResult]:
    """Yield the behaviour of a local folder, or of the place where it would be made."""
    existing = next((folder for folder in (wanted, *wanted.parents) if folder.is_dir()), Path("/"))
    probe = existing / f".elasticflow-doctor-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
    except OSError as error:
        meaning = "a run could not write there" if existing == wanted else f"{wanted} could not be made"
        remedy = f"check owner, permissions and free space of {existing}, or choose another place"
        yield _TOPIC.problem(name, f"{existing}: {error.strerror}", meaning, remedy)
        return
    try:
        yield from _behaviour(name, Storage(str(probe)), str(wanted))
        yield _lock(name, probe)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    yield _space(name, existing)
    system = file_system_of(existing) or "unknown"
    if system.startswith(_NETWORK):
        meaning = "locks and times are the server's; two machines see each other's files late where it caches"
        remedy = "mount with lookupcache=none or noac, keep run folders local, or set snapshots.uri to an object store"
        yield _TOPIC.warning(f"{name}: system", f"{system}, over the network", meaning, remedy)
    elif system in {"tmpfs", "ramfs"}:
        yield _TOPIC.warning(f"{name}: system", f"{system}, in memory", "gone after a restart of the machine")
    else:
        yield _TOPIC.ok(f"{name}: system", system)


def _remote(storage: Storage) -> Iterator[CheckResult]:
    folder = f".elasticflow-doctor-{secrets.token_hex(4)}"
    try:
        yield from _behaviour("snapshots", storage, storage.uri, f"{folder}/")
    finally:
        with contextlib.suppress(OSError, StorageError):  # if no file could be written, none is left
            storage.remove_tree(folder)


def _behaviour(name: str, storage: Storage, shown: str, prefix: str = "") -> Iterator[CheckResult]:
    """Yield the results of writing, exclusive creation and removal; no file is left."""
    paths = [f"{prefix}probe-{number}" for number in range(3)]
    try:
        times = [_timed(storage, path) for path in paths]
        was_made_again = storage.create(paths[0], b"another")
        content, modified = storage.read(paths[0]), storage.modified(paths[0])
    except (OSError, StorageError) as error:
        text = error.message if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
        remedy = getattr(error, "remedy", None) or "check the address, that it exists, and its credentials"
        yield _TOPIC.problem(name, f"{shown}: {text}", "snapshots could not be written", remedy)
        return
    finally:
        with contextlib.suppress(OSError, StorageError):
            for path in paths:
                storage.remove(path)
    if was_made_again or content != b"probe-0":
        meaning = "a generation exists by exclusive creation: two launches could write to one run"
        yield _TOPIC.problem(name, f"{shown} lets a file be made twice", meaning, "use another store")
        return
    typical = statistics.median(times)
    fact = f"{shown} is writable; a small file takes {span(typical)}"
    if typical > _SLOW_S:
        yield _TOPIC.warning(name, fact, "each commit needs several: snapshots end late", "a nearer store")
    else:
        yield _TOPIC.ok(name, fact)
    skew = None if modified is None else modified - time.time()
    if skew is not None and abs(skew) > _SKEW_S:
        fact = f"the store is {span(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this machine"
        meaning = "requests may be refused as too old, and times in logs do not fit together"
        yield _TOPIC.warning(f"{name}: clock", fact, meaning, "timedatectl set-ntp true")


def _timed(storage: Storage, path: str) -> float:
    began = time.perf_counter()
    storage.create(path, path.rpartition("/")[2].encode())
    return time.perf_counter() - began


def _lock(name: str, probe: Path) -> CheckResult:
    descriptors = [os.open(probe / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    try:
        fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(descriptors[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _TOPIC.ok(f"{name}: locks", "flock keeps a second supervisor out")
        fact = "two at once get the same lock"
    except OSError as error:
        fact = f"flock: {error.strerror}"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    meaning = "a run could be started twice on this machine"
    return _TOPIC.problem(f"{name}: locks", fact, meaning, "keep run folders on a local disk")


def _space(name: str, folder: Path) -> CheckResult:
    free = shutil.disk_usage(folder).free
    fact = f"{size(free)} free"
    if free >= _LITTLE:
        return _TOPIC.ok(f"{name}: space", fact)
    meaning = (
        "a snapshot is the model, its optimizer's state and more: `elasticflow plan` tells how many bytes"
    )
    found = _TOPIC.problem if free < _TOO_LITTLE else _TOPIC.warning
    return found(f"{name}: space", fact, meaning, "make room, or lower snapshots.keep")
