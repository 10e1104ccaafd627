"""The inputs of a run or a job file, and the differences between the inputs of two."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder import made_in, source_copy
from elasticflow.compiler.provenance.drift import Difference, compare_made
from elasticflow.compiler.provenance.origins import Made, environment_of, made_from, origins_now
from elasticflow.errors import RunNotFoundError, StorageError
from elasticflow.observe.runs import find_run
from elasticflow.observe.snapshots.locate import URL
from elasticflow.observe.status import read_status
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.observe.status import RunStatus

_DIGEST_SHOWN = 12


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, or of a job file.

    Attributes:
        name: Name for people: "mnist 20261120-104500-4f2a", "jobs/mnist.toml", or a URI.
        made: The job, with the files and options that it was made from.
        root: Folder that the paths of its files start from; None: the files are not here.
        copies: The launch folder, which holds copies of its files; None for a job file.
        data: Facts of each data set, by name, as the run found them.
        status: State of the run; None if there is no run folder.
    """

    name: str
    made: Made
    root: Path | None = None
    copies: Path | None = None
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    status: RunStatus | None = None

    def text_of(self, file: str) -> str | None:
        """Return the text of *file* as the run used it; None if that text is not kept."""
        path = None if self.root is None else self.root / file
        if self.copies is not None:
            path = self.copies / source_copy(file)
        try:
            return None if path is None else path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None


def inputs_of_run(project_root: Path, text: str) -> RunInputs:
    """Return the inputs of the newest launch of a run; *text* is as for `find_run`, or the run's URI.

    Raises:
        RunNotFoundError: there is no such run, or it was never launched.
        StorageError: the place at the URI cannot be read.
        LaunchFolderError: its record cannot be read.
    """
    if URL.match(text):
        return _inputs_at(text)
    folder = find_run(project_root, text)
    if (launch := folder.newest_launch) is None:
        raise RunNotFoundError(f"run {folder.run_id} was never launched", "start it: elasticflow run JOB")
    return RunInputs(
        f"{folder.job} {folder.run_id}",
        made_in(launch),
        folder.project_root,
        launch,
        environment_of(launch).datasets,
        read_status(folder),
    )


def inputs_of_job(loaded: LoadedJob, other: RunInputs | None) -> RunInputs:
    """Return the inputs of a launch of the job file now; they include the files that *other* has in use."""
    from elasticflow.compiler.plan.launch_plan import plan_job

    root = loaded.project_root
    files = plan_job(loaded.job, project_root=root, job_files=loaded.files).job_files
    before = None if other is None else other.made.origins
    return RunInputs(
        str(loaded.path), Made(loaded.job, origins_now(loaded.job, root, files, "", before)), root
    )


def _inputs_at(uri: str) -> RunInputs:
    storage = Storage(uri.rstrip("/"))
    try:
        record = Catalog(storage, "").read_job_record()
        if record is None:
            raise RunNotFoundError(
                f"there is no JOB.json at {storage.uri}",
                "give the run's own folder: snapshots.uri and its id",
            )
        return RunInputs(storage.uri, made_from(record))
    except OSError as error:
        raise StorageError(
            f"{storage.uri} cannot be read: {error}", "check the address and its credentials, then try again"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunNotFoundError(f"JOB.json at {storage.uri} cannot be read: {error}") from error


def differences_of(old: RunInputs, new: RunInputs) -> list[Difference]:
    """Return the differences, weighed as if the run *old* were to continue as *new*; the results of the runs do not count."""
    return [*compare_made(old.made, new.made), *_data(old, new), *_patch(old, new)]


def source_diff(old: RunInputs, new: RunInputs) -> Iterator[str]:
    """Yield the lines of a unified diff of every file that differs and is kept on both sides."""
    before, after = old.made.origins.sources, new.made.origins.sources
    for name in sorted({**before, **after}):
        was, now = before.get(name), after.get(name)
        if was is not None and now is not None and was.sha256 == now.sha256:
            continue
        text, new_text = (
            inputs.text_of(name) if source else "" for inputs, source in ((old, was), (new, now))
        )
        if text is None or new_text is None:
            yield f"--- {name}: its text is not kept"
            continue
        yield from difflib.unified_diff(
            text.splitlines(),
            new_text.splitlines(),
            f"{old.name}: {name}",
            f"{new.name}: {name}",
            lineterm="",
        )


def _data(old: RunInputs, new: RunInputs) -> Iterator[Difference]:
    for name, was in old.data.items():
        now = new.data.get(name)
        if now is None:
            continue
        yield from _values(name, was.get("values"), now.get("values"))
        if was.get("fingerprint") == now.get("fingerprint"):
            continue
        before, after = (
            f"{str(data.get('fingerprint'))[:_DIGEST_SHOWN]} ({data.get('samples')})" for data in (was, now)
        )
        yield Difference(
            f"data.{name}", before, after, "corrupting", "other data: a run does not continue with it"
        )


def _values(name: str, was: object, now: object) -> Iterator[Difference]:
    """Yield the differing values of the data for which arguments of both jobs stand."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was:
            if key in now and was[key] != now[key]:
                reason = "the job is made with it: a run does not continue with another"
                yield Difference(f"data.{name}.{key}", was[key], now[key], "corrupting", reason)


def _patch(old: RunInputs, new: RunInputs) -> Iterator[Difference]:
    was, now = (inputs.made.origins.git or {} for inputs in (old, new))
    if was and now and was.get("patch") != now.get("patch"):
        reason = "what is not committed; see the sources"
        yield Difference("git.patch", _shown(was.get("patch")), _shown(now.get("patch")), "harmless", reason)


def _shown(patch: str | None) -> str:
    return "clean" if patch is None else patch[:_DIGEST_SHOWN]
