"""Committed snapshots and generations of a run at its URI."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import run_folder
from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, Manifest, OtherVersionError
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection, records
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.format.manifest import FileEntry

_GENERATION = re.compile(r"(?P<number>\d{4,})\.json")
_NAMED_FILE = re.compile(rf"(?P<name>{run_folder.SNAPSHOT_NAME.pattern})\.json")
# Errors of a file, not of its disk.
_OF_A_FILE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EIO}
_JOB, _STOP, _PINS, _VERDICTS = "JOB.json", "STOPPED.json", "pins", "verdicts"


class Catalog:
    """Content of a run's snapshot URI.

    Attributes:
        prefix: The run's place under it: `""` when the URI is the run folder itself, else `<run id>/`.
    """

    def __init__(self, storage: Storage, prefix: str = "") -> None:
        self.storage = storage
        self.prefix = prefix

    @classmethod
    def of_run(cls, settings: SnapshotSettings, folder: RunFolder, run_id: str) -> Catalog:
        """Return the catalog of run *run_id* under the URI of *settings*; relative paths start at the working directory."""
        if settings.uri is None:
            return cls(Storage(str(folder.path)))
        return cls(Storage(settings.uri, settings.options), f"{run_id}/")

    def folder(self, name: str = "") -> str:
        """Return the path of snapshot *name* in the storage, or of the folder of all snapshots."""
        return f"{self.prefix}snapshots/{name}" if name else f"{self.prefix}snapshots"

    def check_writable(self) -> None:
        """Make sure that files can be made; on a local disk also in each folder of an earlier launch, which may be another user's.

        Raises:
            StorageError: as for `Storage.check_writable`.
        """
        self.storage.check_writable()
        if self.storage.is_local:
            for path in (self.folder("x"), self._generation(1)):
                folder = self.storage.local_path(path).parent
                if folder.is_symlink() or folder.exists():
                    self.storage.check_writable(f"{Path(path).parent}/")

    def committed(self) -> list[Manifest]:
        """Return the snapshots that could be restored, newest (generation, step) first.

        A later generation began where an earlier one was left. A writer of an older generation that was halted between
        its look at the fence and the commit may commit late; its snapshot is never taken for the newest.
        Snapshots that are uncommitted or set aside, or whose manifest is damaged (see `damaged`) or another version's,
        are left out.
        """
        return [content for _, content in self.scan() if isinstance(content, Manifest)]

    def newest(self) -> Manifest | None:
        """Return the newest snapshot that could be restored; reads no manifest of older ones.

        Raises:
            OtherVersionError: only another version of elasticflow can restore it.
        """
        return next(self.of_this_version(), None)

    def of_this_version(self) -> Iterator[Manifest]:
        """Yield the snapshots that could be restored, as `committed` orders them.

        Raises:
            OtherVersionError: only another version of elasticflow can restore the next one.
        """
        for _, content in self.scan():
            if isinstance(content, OtherVersionError):
                raise content
            if isinstance(content, Manifest):
                yield content

    def damaged(self) -> dict[str, str]:
        """Return name and reason of snapshots whose manifest cannot be read and that are not set aside yet."""
        return {name: damage for name, damage in self.scan() if isinstance(damage, str)}

    def uncommitted(self) -> list[str]:
        """Return the names of snapshot folders without a manifest: being written, or left by a dead writer."""
        return [name for name in self._names() if not self.is_committed(name)]

    def is_committed(self, name: str) -> bool:
        """Return whether snapshot *name* exists, by one request."""
        return self.storage.exists(f"{self.folder(name)}/{manifest.FILE_NAME}")

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of snapshot *name*.

        Raises:
            FileNotFoundError: the snapshot is not committed.
            DamagedSnapshotError: its manifest is not what was written.
            OtherVersionError: only another version of elasticflow reads its manifest.
            OSError: its manifest cannot be read; that may be damage or an outage.
        """
        try:
            data = self.storage.read(f"{self.folder(name)}/{manifest.FILE_NAME}")
        except (IsADirectoryError, NotADirectoryError):
            raise DamagedSnapshotError(f"{manifest.FILE_NAME} is a directory") from None
        parsed = manifest.parse(data)
        if parsed.name != name:
            raise DamagedSnapshotError(f"{manifest.FILE_NAME} is that of snapshot {parsed.name}")
        return parsed

    def can_reuse(self, location: str, entry: FileEntry) -> bool:
        """Return whether a snapshot may refer to the file at *location*, as `Manifest.location` gives it.

        Its snapshot must be committed and not set aside, and the file must have the size that was written.
        """
        owner = location.partition("/")[0]
        if not self.is_committed(owner):
            return False
        if self.storage.exists(self._verdict(owner)):
            return False
        with contextlib.suppress(FileNotFoundError):
            return self.storage.size(f"{self.folder()}/{location}") == entry.size
        return False

    def quarantine(self, name: str, reason: str) -> None:
        """Set snapshot *name* aside: it is never restored, never counted as kept, and stays for inspection."""
        verdict = {"name": name, "reason": reason, "created": time.time()}
        self.storage.create(self._verdict(name), json.dumps(verdict).encode())

    def lift(self, name: str) -> None:
        """Have snapshot *name* restorable again; no error if it is not set aside."""
        self.storage.remove(self._verdict(name))

    def quarantined(self) -> dict[str, str]:
        """Return name and reason of the snapshots set aside."""
        return self._noted(_VERDICTS, "reason", "no reason is readable")

    def pin(self, name: str, note: str = "") -> None:
        """Keep snapshot *name* until it is unpinned, regardless of the policy; *note* tells people why.

        Raises:
            SnapshotError: there is no such committed snapshot; no pin is left behind then.
        """
        content = {"name": name, "note": note, "created": time.time()}
        self.storage.write(self._pin(name), [json.dumps(content).encode()])
        # Checked last: retention checks pins before it removes, so one of the two sees the other.
        if not self.is_committed(name):
            self.unpin(name)
            raise SnapshotError(f"there is no snapshot {name}")

    def unpin(self, name: str) -> None:
        """Leave snapshot *name* to the policy again; no error if it was not pinned."""
        self.storage.remove(self._pin(name))

    def is_pinned(self, name: str) -> bool:
        """Return whether snapshot *name* is pinned, by one request."""
        return self.storage.exists(self._pin(name))

    def pinned(self) -> dict[str, str]:
        """Return name and note of the pinned snapshots."""
        return self._noted(_PINS, "note", "")

    def _noted(self, folder: str, key: str, default: str) -> dict[str, str]:
        """Return the text that each record in *folder* has under *key*, by the name of its snapshot."""
        matches = map(_NAMED_FILE.fullmatch, self.storage.list(f"{self.prefix}{folder}"))
        return {m["name"]: str(self._read(f"{folder}/{m[0]}").get(key, default)) for m in matches if m}

    def remove_snapshot(self, name: str) -> None:
        """Remove snapshot *name*, its manifest first: half removed, it is invisible instead of damaged."""
        self.storage.remove(f"{self.folder(name)}/{manifest.FILE_NAME}")
        fault_injection.reach("retention.between")
        self.storage.remove_tree(self.folder(name))

    def do_all(self, removals: Iterable[Callable[[], None]]) -> None:
        """Call all *removals*, also after one of them failed.

        Raises:
            OSError: the first error, once all were called; at once if the store does not answer.
        """
        first: OSError | None = None
        for remove in removals:
            try:
                remove()
            except OSError as error:
                if not (self.storage.is_local or isinstance(error, PermissionError)):
                    raise
                first = first or error
        if first is not None:
            raise first

    def claim_generation(self, info: Mapping[str, Any]) -> int:
        """Claim the next generation and return its number; two launches never get the same.

        Claims that were lost are made again: a writer learns from the claim after its own that it is fenced off.
        """
        claims = self._claims()
        number = self.newest_generation() + 1
        now = time.time()
        for lost in sorted(set(range(1, number)) - claims.keys()):
            self.storage.create(self._generation(lost), json.dumps({"lost": True, "created": now}).encode())
        data = json.dumps({**info, "created": now}).encode()
        while not self.storage.create(self._generation(number), data):
            number += 1
        return number

    def claim_after(self, number: int, info: Mapping[str, Any]) -> bool:
        """Claim the generation after *number*; False if another launch has claimed it: that launch has the run now.

        If the store's answer was lost and the request sent again, the claim found is our own if it equals *info* apart from
        the reason and later failures.
        """
        data = json.dumps({**info, "created": time.time()}).encode()
        if self.storage.create(self._generation(number + 1), data):
            return True
        claim = self._read(run_folder.generation_file(number + 1))
        return all(
            claim.get(key) == value for key, value in info.items() if key not in {"reason", "failures"}
        )

    def newest_generation(self) -> int:
        """Return the highest generation that exists; 0 if there is none.

        A snapshot shows that its generation existed, even if the claim is lost.
        """
        taken = (_age(name)[0] for name in self._names())
        return max((*self._claims(), *taken), default=0)

    def generations(self, after: int = 0) -> dict[int, dict[str, Any]]:
        """Return the claims of the generations after *after*, by ascending number: launch, reason, time."""
        files = self._claims()
        return {
            number: self._read(f"generations/{files[number]}") for number in sorted(files) if number > after
        }

    def newest_claim(self) -> dict[str, Any]:
        """Return the claim of the newest generation that has one; empty if none has."""
        files = self._claims()
        return self._read(f"generations/{files[max(files)]}") if files else {}

    def _claims(self) -> dict[int, str]:
        """Return the file that claims each generation, by number."""
        matches = map(_GENERATION.fullmatch, self.storage.list(f"{self.prefix}generations"))
        return {int(match["number"]): match[0] for match in matches if match}

    def is_fenced(self, generation: int) -> bool:
        """Return whether a later generation exists, by one request: numbers are claimed without gaps."""
        return self.storage.exists(self._generation(generation + 1))

    def write_job_record(self, record: Mapping[str, Any]) -> None:
        """Write JOB.json, the sources of the newest launch, in one act."""
        self.storage.write(f"{self.prefix}{_JOB}", [json.dumps(record, indent=1).encode()])

    def read_job_record(self) -> dict[str, Any] | None:
        """Return JOB.json's content; None if it is absent or damaged."""
        record = self.inspect_job_record()
        return record if isinstance(record, dict) and record else None

    def inspect_job_record(self) -> dict[str, Any] | Damage | None:
        """Return JOB.json's content, its damage, or None if there is none."""
        return self._record(_JOB)

    def mark_launch(self, launch_id: str) -> None:
        """Let other machines see the launch: JOB.json may be an older one's again, whose process was stopped before it wrote."""
        self.storage.create(self.prefix + run_folder.launch_file(launch_id), launch_id.encode())

    def has_launch(self, launch_id: str) -> bool:
        """Return whether the launch was marked here."""
        return self.storage.exists(self.prefix + run_folder.launch_file(launch_id))

    def write_stop(self, record: Mapping[str, Any]) -> None:
        """Write STOPPED.json: the job's own code ended training at a step before its length."""
        self.storage.write(f"{self.prefix}{_STOP}", [json.dumps(record).encode()])

    def read_stop(self) -> dict[str, Any] | None:
        """Return STOPPED.json's content, or None if there is none."""
        return self._read(_STOP) or None

    def _verdict(self, name: str) -> str:
        return f"{self.prefix}{_VERDICTS}/{name}.json"

    def _pin(self, name: str) -> str:
        return f"{self.prefix}{_PINS}/{name}.json"

    def _generation(self, number: int) -> str:
        return f"{self.prefix}{run_folder.generation_file(number)}"

    def _names(self) -> list[str]:
        """Names of all snapshot folders, newest first, without `.tmp-` folders and other names."""
        names = self.storage.list(self.folder())
        return sorted(filter(run_folder.SNAPSHOT_NAME.fullmatch, names), key=_age, reverse=True)

    def scan(self) -> Iterator[tuple[str, Manifest | OtherVersionError | str]]:
        """Yield the names of all snapshots committed and not set aside, newest first, as `read_manifests` does.

        Raises:
            OSError: the folder, or every manifest in it, cannot be read.
        """
        set_aside = self.quarantined()
        names = (name for name in self._names() if name not in set_aside)
        for name, content in self.read_manifests(names):
            if content is not None:
                yield name, content

    def read_manifests(
        self, names: Iterable[str]
    ) -> Iterator[tuple[str, Manifest | OtherVersionError | str | None]]:
        """Yield each name with its manifest, the error of another version's manifest, the damage, or None: no manifest.

        A manifest that cannot be read while another one can is damage of that snapshot. Only where none can be read is
        it an outage, which says nothing about any of them.

        Raises:
            OSError: none of the manifests can be read.
        """
        unread: list[tuple[str, OSError]] = []
        is_any_read = False
        for name in names:
            content: Manifest | OtherVersionError | str
            try:
                content = self.manifest(name)
            except FileNotFoundError:
                yield name, None
                continue
            except DamagedSnapshotError as error:
                content = error.message
            except OtherVersionError as error:
                content = error
            except OSError as error:
                if not is_any_read:
                    unread.append((name, error))
                    continue
                content = _unreadable(error)
            is_any_read = True
            yield from ((older, _unreadable(error)) for older, error in unread)
            unread.clear()
            yield name, content
        if unread:
            raise unread[0][1]

    def _read(self, path: str) -> dict[str, Any]:
        """Return a record beside the snapshots; empty if it is absent or damaged."""
        record = self._record(path)
        return record if isinstance(record, dict) else {}

    def _record(self, path: str) -> dict[str, Any] | Damage | None:
        """Return a record beside the snapshots, its damage, or None if there is none.

        Raises:
            OSError: the store does not answer.
        """
        address = f"{self.storage.uri.rstrip('/')}/{self.prefix}{path}"
        try:
            return records.parse(self.storage.read(self.prefix + path))
        except FileNotFoundError:
            return None
        except records.BadJsonError as error:
            return Damage(address, str(error))
        except OSError as error:
            if not self.storage.is_local or error.errno not in _OF_A_FILE:
                raise
            return Damage(address, records.damage_of(Path(path), error).why)


def _unreadable(error: OSError) -> str:
    return f"{manifest.FILE_NAME} {records.damage_of(Path(), error).why}"


def _age(name: str) -> tuple[int, int, str]:
    match = run_folder.SNAPSHOT_NAME.fullmatch(name)
    assert match is not None
    return int(match["generation"]), int(match["step"]), name
