"""The launch folder on disk: its files, from a plan, and the plan and the record that are read back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.factories import call_forms
from elasticflow.compiler.entry_point.render import render
from elasticflow.compiler.plan.launch_plan import LaunchPlan
from elasticflow.compiler.plan.torchrun import ENTRY_POINT
from elasticflow.compiler.provenance.job_json import from_json, job_to_json, to_json
from elasticflow.compiler.provenance.origins import (
    JOB_FILE,
    JOB_JSON,
    Made,
    Origins,
    made_from,
    own_sources,
    with_environment,
)
from elasticflow.compiler.torchrun_script import torchrun_script
from elasticflow.errors import ElasticflowError, LaunchFolderError, RecordError
from elasticflow.run_folder import snapshot_place
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import atomic_files, records
from elasticflow.system.records import Damage
from elasticflow.system.redaction import public_overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.run_folder import RunFolder

PLAN_JSON = "plan.json"
TRAIN_PY = ENTRY_POINT
TORCHRUN_ARGS = "torchrun.args"
TORCHRUN_SH = "torchrun.sh"
SOURCES = "sources"

_LARGEST_SOURCE = 1 << 20
_WRITTEN = "written"  # key of plan.json: SHA-256 of the files as written, to notice edits


def launch_files(
    plan: LaunchPlan,
    job: Job,
    folder: Path,
    *,
    project_root: Path,
    overrides: Sequence[str] = (),
    entry_point: str | None = None,
    origins: Origins | None = None,
    drift: Sequence[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Return the text of every file of the launch folder by name; plan.json, which has the digests, comes last.

    Args:
        overrides: The `--set` values that the job was resolved with.
        entry_point: An edited train.py to keep instead of a new one.
        origins: Origins of the launch; None: nothing is launched, and the files depend on the job alone.

    Raises:
        JobRefusedError: an argument of the job has no Python literal.
    """
    root = Path(os.path.relpath(project_root.resolve(), folder.resolve())).as_posix()
    made = Made(job, origins or Origins(own_sources(job, project_root, plan.job_files)))
    record = job_record(plan, made, overrides) | {"root": root}
    if origins is not None:
        record["drift"] = list(drift)
    # A resumed run reads job.json, as its job file may be gone. Later launches are compared with it.
    kept = [*plan.job_files, *(() if origins is None else origins.sources)]
    texts = {name: _text_of(project_root / name) for name in kept}
    files = {source_copy(name): text for name, text in texts.items() if text is not None}
    rendered: dict[str, str] = {}
    if plan.script is None:
        rendered[TRAIN_PY] = render(
            job,
            forms=call_forms(job, project_root),
            digest=plan.job_digest,
            job_file=plan.job_files[0],
            root=root,
            overrides=public_overrides(overrides),
            case=plan.case,
        )
    files |= {
        JOB_JSON: _json(record),
        **{name: text if entry_point is None else entry_point for name, text in rendered.items()},
        TORCHRUN_ARGS: "".join(f"{argument}\n" for argument in plan.torchrun_args),
        TORCHRUN_SH: torchrun_script(plan, root),
    }
    # job.json has the state of git and of the machine, so its digest would differ for the same job.
    written = {name: _sha256(text) for name, text in files.items() if name != JOB_JSON}
    # An edited train.py that is kept must still count as edited.
    written |= {name: _sha256(text) for name, text in rendered.items()}
    return files | {PLAN_JSON: _json({**to_json(plan.public().model_dump()), _WRITTEN: written})}


def job_record(plan: LaunchPlan, made: Made, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record of a launch's job and origins, without secrets, as job.json and JOB.json have it."""
    return {
        "format": 1,
        "digest": plan.job_digest,
        "job": job_to_json(made.job),
        "files": list(plan.job_files),
        "overrides": list(public_overrides(overrides)),
        "case": plan.case,
        **made.origins.to_json(),
    }


def source_copy(name: str) -> str:
    """Return the path of a file's copy in a launch folder; files outside the project are under `up/`."""
    inside = PurePosixPath(*("up" if part == ".." else part for part in PurePosixPath(name).parts))
    return f"{SOURCES}/{inside.as_posix()}"


def materialize(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write the launch folder; a folder that did not exist appears complete or not at all.

    Args:
        folder: The launch folder; in an existing folder only our own files are replaced, one by one.
        files: Result of `launch_files`.
        force: Replace files that were edited or are not ours.

    Raises:
        LaunchFolderError: the folder cannot be written, or holds other or edited files of these names.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            write_into(folder, files, vouched=_vouched(folder), force=force)
        else:
            write_new(folder, files)
    except OSError as error:
        remedy = None
        if isinstance(error, NotADirectoryError | FileExistsError):
            remedy = "a file stands in the way: name a folder"
        raise LaunchFolderError(f"cannot write {folder}: {error.strerror or error}", remedy) from error


def _vouched(folder: Path) -> dict[str, str | None]:
    """Return the digests of the files that we wrote to *folder*; none if plan.json is not ours."""
    values = records.read(folder / PLAN_JSON)
    written = values.get(_WRITTEN) if isinstance(values, dict) else None
    return {**written, PLAN_JSON: None, JOB_JSON: None} if isinstance(written, dict) else {}


def _text_of(path: Path) -> str | None:
    """Return a source file's text; None if the file is missing, too large or not UTF-8."""
    try:
        return path.read_bytes().decode() if path.stat().st_size <= _LARGEST_SOURCE else None
    except (OSError, UnicodeDecodeError):
        return None


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Create *folder* with these files: after a crash the folder is complete or absent.

    Raises:
        OSError: the folder cannot be written, or another process has made it meanwhile and put files into it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = atomic_files.temporary_beside(folder)
    try:
        for name, text in files.items():
            _write(draft / name, text)
        for inner in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            atomic_files.sync_folder(inner)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    atomic_files.sync_folder(folder.parent)


def write_into(
    folder: Path, files: Mapping[str, str], *, vouched: Mapping[str, str | None], force: bool
) -> None:
    """Replace these files of *folder* one by one, in order; if a file must not be replaced, nothing is written.

    Other files stay, except unedited files of ours that no longer belong to the folder.

    Args:
        folder: An existing folder.
        files: Text by name.
        vouched: SHA-256 of each file as we last wrote it; None: replace the file whatever its content.
        force: Replace all files whatever their content.

    Raises:
        LaunchFolderError: a file was edited, or is not ours.
        OSError: a file cannot be written.
    """
    if not force:
        _refuse_others_work(folder, files, vouched)
    for name, text in files.items():
        _write(folder / name, text)
    for name in vouched.keys() - files.keys():
        path = folder / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == vouched[name]:
            path.unlink()


def _refuse_others_work(folder: Path, files: Mapping[str, str], vouched: Mapping[str, str | None]) -> None:
    foreign: list[str] = []
    edited: list[str] = []
    for name, text in files.items():
        path = folder / name
        if not path.exists() or vouched.get(name, "") is None:
            continue
        content = path.read_bytes()
        if content == text.encode() or hashlib.sha256(content).hexdigest() == vouched.get(name):
            continue
        (edited if name in vouched else foreign).append(name)
    if edited:
        raise LaunchFolderError(
            f"{folder}: edited by hand since it was written: {', '.join(edited)}",
            "--force replaces it; or write to another folder",
        )
    if foreign:
        raise LaunchFolderError(
            f"{folder}: made by something else: {', '.join(foreign)}",
            "--force replaces it; or write to another folder",
        )


def _write(path: Path, text: str) -> None:
    atomic_files.write(path, [text.encode()], 0o777 if text.startswith("#!") else 0o666)


def read_plan(folder: Path) -> LaunchPlan:
    """Return the plan that was written to *folder*.

    Raises:
        LaunchFolderError: the folder has no plan.json, or one that this version cannot read.
    """
    path = folder / PLAN_JSON
    values = records.read(path)
    if not isinstance(values, dict):
        raise LaunchFolderError(
            f"{path} is absent" if values is None else str(values),
            "is this a folder that `elasticflow plan -o` made?"
            if values is None
            else "compile the job again",
        )
    values.pop(_WRITTEN, None)
    values.pop("worlds", None)  # of earlier versions
    try:
        return LaunchPlan.model_validate(from_json(values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a ValidationError is a ValueError
        raise LaunchFolderError(
            f"{path} is damaged, or was written by another version of elasticflow",
            "compile the job again",
        ) from error


def digest_as_written(folder: Path) -> str | Damage:
    """Return the SHA-256 of train.py in *folder* as it was written, or the damage of plan.json, which holds it."""
    path = folder / PLAN_JSON
    values = records.read(path)
    if not isinstance(values, dict):
        return values or Damage(str(path), "is absent")
    written = values.get(_WRITTEN)
    digest = written.get(TRAIN_PY) if isinstance(written, dict) else None
    return digest if isinstance(digest, str) else Damage(str(path), "does not tell what was written")


@dataclass(frozen=True)
class LaunchRecord:
    """A launch as it was recorded.

    Attributes:
        place: Path for messages.
        files: The job file and the files it extends, relative to the project root; None if not recorded.
        overrides: `--set` values that the job was resolved with.
        case: Name of the job's case in the job file's [matrix].
    """

    place: str
    made: Made
    files: tuple[str, ...] | None
    overrides: tuple[str, ...]
    case: str | None


def record_in(folder: Path) -> LaunchRecord | Damage | None:
    """Return the content of job.json of the launch in *folder*, with the report of its workers.

    Returns the damage if the file cannot be used; None if it is absent.
    """
    path = folder / JOB_JSON
    content = records.read(path)
    record = record_from(content, str(path)) if isinstance(content, dict) else content
    if isinstance(record, LaunchRecord):
        return replace(record, made=with_environment(record.made, folder))
    return record


def made_in(folder: Path) -> Made:
    """Return the job and origins of the launch in *folder*, with its workers' report.

    Raises:
        LaunchFolderError: there is no job.json that this version can read.
    """
    record = record_in(folder)
    if isinstance(record, LaunchRecord):
        return record.made
    raise LaunchFolderError(f"{folder / JOB_JSON} is absent" if record is None else str(record))


def newest_record(folder: RunFolder) -> tuple[LaunchRecord | None, list[Damage]]:
    """Return the newest launch on this machine whose record is whole, and the damage of newer records."""
    damages: list[Damage] = []
    for number in reversed(folder.launch_numbers()):
        record = record_in(folder.launch(number))
        if isinstance(record, LaunchRecord):
            return record, damages
        damages.append(record or Damage(str(folder.launch(number) / JOB_JSON), "is absent"))
    return None, damages


def last_record(folder: RunFolder, project_root: Path, warn: Callable[[str], None]) -> LaunchRecord:
    """Return the record of the run's last launch, as far as this machine's files tell; warn of damaged records.

    Raises:
        RecordError: there is no usable record.
    """
    newest = folder.launch(folder.launch_numbers()[-1])
    record = record_in(newest)
    if isinstance(record, LaunchRecord):
        return record
    damage = record or Damage(str(newest / JOB_JSON), "is absent")
    instead = _record_beside(folder, project_root, newest) or newest_record(folder)[0]
    if instead is None:
        raise RecordError(
            f"nothing tells how run {folder.run_id} was launched: {damage}",
            f"give its job file: elasticflow run JOB.toml --run-id {folder.run_id}",
        )
    warn(f"{damage}; {instead.place} is used instead")
    return instead


def _record_beside(folder: RunFolder, project_root: Path, launch: Path) -> LaunchRecord | None:
    """Return the record in JOB.json, at the snapshots' place that plan.json of *launch* names; None if unusable."""
    try:
        snapshots = read_plan(launch).snapshots
        uri, prefix = snapshot_place(snapshots.uri, folder, project_root)
        catalog = Catalog(Storage(uri, snapshots.options), prefix)
    except ElasticflowError:  # without the plan: the default place of snapshots
        catalog = Catalog(Storage(str(folder.path)))
    with suppress(OSError, ElasticflowError):
        content = catalog.inspect_job_record()
        if isinstance(content, dict):
            record = record_from(content, f"{catalog.storage.uri}/JOB.json")
            return record if isinstance(record, LaunchRecord) else None
    return None


def record_from(content: Mapping[str, Any], place: str) -> LaunchRecord | Damage:
    """Return the record in the content of job.json or JOB.json, or its damage."""
    try:
        made = made_from(content)
        files = content.get("files")
        if files is None:  # JOB.json of earlier versions has no files
            own = [name for name, each in made.origins.sources.items() if JOB_FILE in each.roles]
            files = own if len(own) == 1 else None  # of several files, any may be the job's own
        return LaunchRecord(
            place,
            made,
            None if files is None else _texts(files, "files"),
            _texts(content.get("overrides") or [], "overrides"),
            _text_or_none(content.get("case"), "case"),
        )
    except ElasticflowError as error:
        return Damage(place, f"is not what this version writes: {error.message}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a ValidationError is a ValueError
        text = str(error).strip().splitlines() or [""]
        return Damage(place, f"is not what this version writes: {type(error).__name__}: {text[0]}")


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{what} is no list of texts")
    return tuple(value)


def _text_or_none(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} is no text")
    return value
