"""What a launch was made from besides the keys of its job: sources, git, versions, machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.compiler.inputs import provenance
from elasticflow.compiler.inputs.job_json import job_from_json
from elasticflow.compiler.inputs.sources import JOB_FILE, SourceFile, own_sources
from elasticflow.errors import LaunchFolderError
from elasticflow.system import records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

JOB_JSON = "job.json"
ENVIRONMENT_JSON = "environment.json"  # beside it: what only workers know


@dataclass(frozen=True)
class Origins:
    """What took part in a launch; a compiled folder knows its sources only.

    Attributes:
        sources: Files of the job's own by their path from the project's root.
        git: The checkout; None outside of git, or unknown.
        versions: Of Python and of every distribution that took part, as far as is known.
        machine: Where the launch began; empty: unknown.
        launch_id: Tells this launch from every other one, on any machine; empty for a compiled folder.
    """

    sources: Mapping[str, SourceFile]
    git: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    launch_id: str = ""

    @property
    def code(self) -> dict[str, str]:
        """SHA-256 of every file but the job's, by its path: what all machines of a run have in common."""
        return {name: each.sha256 for name, each in self.sources.items() if JOB_FILE not in each.roles}

    def to_json(self) -> dict[str, Any]:
        """Return what job.json and JOB.json hold of it."""
        sources = {
            name: {"sha256": each.sha256, "roles": list(each.roles)} for name, each in self.sources.items()
        }
        if not self.launch_id:
            return {"sources": sources}
        return {
            "launch_id": self.launch_id,
            "sources": sources,
            "git": None if self.git is None else dict(self.git),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }


class Made(NamedTuple):
    """A job and what a launch of it was made from."""

    job: Job
    origins: Origins


def origins_now(
    job: Job, project_root: Path, job_files: Sequence[str], launch_id: str, before: Origins | None = None
) -> Origins:
    """Return what a launch that begins now on this machine is made from.

    Args:
        job: The resolved job.
        project_root: Folder that its paths are relative to.
        job_files: The job file and what it extends, from the root.
        launch_id: New for each launch.
        before: Of the launch before: what was found in it while it ran is looked at again.
    """
    sources = own_sources(job, project_root, job_files)
    earlier = {} if before is None else before.sources
    for name, file in earlier.items():
        digest = provenance.digest_of(project_root / name)
        if name not in sources and digest is not None:
            sources[name] = SourceFile(digest, file.roles)
    return Origins(
        dict(sorted(sources.items())),
        provenance.git_state(project_root),
        provenance.versions(() if before is None else before.versions),
        provenance.machine(),
        launch_id,
    )


def made_from(record: Mapping[str, Any]) -> Made:
    """Return what job.json or JOB.json tells; what an older one does not know is left empty.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    sources = {
        name: SourceFile(str(each["sha256"]), tuple(map(str, each["roles"])))
        for name, each in _object(record, "sources").items()
    }
    git = record.get("git")
    origins = Origins(
        sources,
        None if git is None else _object(record, "git"),
        {name: str(version) for name, version in _object(record, "versions").items()},
        _object(record, "machine"),
        str(record.get("launch_id", "")),
    )
    return Made(job_from_json(_object(record, "job", record["job"])), origins)


def _object(record: Mapping[str, Any], key: str, value: Any = None) -> dict[str, Any]:
    found = record.get(key, {}) if value is None else value
    if not isinstance(found, dict):
        raise TypeError(f"{key} is no object")
    return found


def made_in(folder: Path) -> Made:
    """Return what the launch in *folder* was made from, with what its workers reported.

    Raises:
        LaunchFolderError: there is no job.json that this version can read.
    """
    path = folder / JOB_JSON
    content = records.read(path)
    if not isinstance(content, dict):
        raise LaunchFolderError(f"{path} is absent" if content is None else str(content))
    try:
        made = made_from(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchFolderError(
            f"{path} is not what this version writes: {type(error).__name__}: {error}"
        ) from error
    return with_environment(made, folder)


def with_environment(made: Made, folder: Path) -> Made:
    """Return what a launch was made from with what its workers, whose launch folder is *folder*, reported."""
    found = environment_of(folder)
    files, versions = found.get("files", {}), found.get("versions", {})
    imported = {name: SourceFile(digest, ("imported",)) for name, digest in files.items()}
    origins = replace(
        made.origins,
        sources={**imported, **made.origins.sources},
        versions={**made.origins.versions, **versions},
    )
    return Made(made.job, origins)


def environment_of(folder: Path) -> dict[str, Any]:
    """Return what the workers of the launch in *folder* reported; empty until they have, and where it is damaged."""
    found = records.read(folder / ENVIRONMENT_JSON)
    if not isinstance(found, dict):
        return {}
    told = (found.get("files", {}), found.get("versions", {}))
    if not all(isinstance(each, dict) and all(isinstance(v, str) for v in each.values()) for each in told):
        return {}
    datasets = found.get("datasets")
    is_told = isinstance(datasets, dict) and all(isinstance(each, dict) for each in datasets.values())
    return {**found, "datasets": datasets if is_told else {}}
