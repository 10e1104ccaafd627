"""Names and paths of all files of a run, in the run folder and under its snapshot URI."""

from __future__ import annotations

import json
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RUNS = "runs"
_GITIGNORE = "# Made by elasticflow, with this folder: logs and snapshots stay out of git.\n*\n"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TRACE = re.compile(r"rank(\d+)\.json\.gz")
SNAPSHOT_NAME = re.compile(r"(?P<step>\d{12})-(?P<generation>\d{4,})-(?P<id>[0-9a-f]{8})")


def new_run_id(now: datetime | None = None) -> str:
    """Return an id like `20261120-104500-4f2a`, which sorts by time and is unique enough within a second on one machine."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class RunFolder:
    """Paths inside `runs/<job>/<run id>/`; no file is created."""

    path: Path

    @classmethod
    def of(cls, project_root: Path, job: str, run_id: str) -> RunFolder:
        """Return the folder of that run under the project root."""
        return cls(project_root / RUNS / job / run_id)

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.name

    @property
    def job(self) -> str:
        """The job's name, which is the parent folder's name."""
        return self.path.parent.name

    @property
    def project_root(self) -> Path:
        """The root of the project whose run it is."""
        # Not `parents[2]`: a copy of the folder may lie at the top of a disk.
        return self.path.parent.parent.parent

    @property
    def events(self) -> Path:
        """The authoritative record of the run: JSON lines that only the supervisor appends."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON line per step or evaluation, without gaps or repeats."""
        return self.path / "metrics.jsonl"

    @property
    def metrics_redone(self) -> Path:
        """Lines of steps that were lost and done again."""
        return self.path / "metrics.redone.jsonl"

    @property
    def ledger(self) -> Path:
        """Failures charged to the restart budget."""
        return self.path / "ledger.jsonl"

    @property
    def state(self) -> Path:
        """The run's state now; replaced atomically."""
        return self.path / "state.json"

    @property
    def lock(self) -> Path:
        """The file that is locked (flock) while a supervisor runs."""
        return self.path / "lock"

    @property
    def cancel(self) -> Path:
        """The file that `elasticflow cancel` makes, on any machine; the supervisor looks for it, the next launch removes it."""
        return self.path / "cancel"

    def agent_log(self, node: str = "n0") -> Path:
        """Output of the agent of *node*, its fork server and its writer."""
        return self.path / "logs" / ("agent.log" if node == "n0" else f"agent-{node}.log")

    @property
    def imports(self) -> Path:
        """The modules, variables and device of workers; standbys prepare these before they are needed."""
        return self.path / "imports.json"

    @property
    def profiles(self) -> Path:
        """Folder of the traces requested by `elasticflow profile`, by number."""
        return self.path / "profiles"

    def profile_request(self, number: int) -> Path:
        """The request for trace *number*."""
        return self.profiles / str(number) / "request.json"

    def profile_numbers(self) -> list[int]:
        """Numbers of all requests for traces that were not withdrawn, ascending."""
        if not self.profiles.is_dir():
            return []
        found = [int(path.name) for path in self.profiles.iterdir() if path.name.isdecimal()]
        return sorted(number for number in found if self.profile_request(number).exists())

    def trace(self, number: int, rank: int) -> Path:
        """Trace of one rank."""
        return self.profiles / str(number) / f"rank{rank}.json.gz"

    def traces(self, number: int) -> dict[int, Path]:
        """The traces of request *number* that exist, by rank, ascending."""
        paths = (self.profiles / str(number)).glob("rank*.json.gz")
        found = {int(match[1]): path for path in paths if (match := _TRACE.fullmatch(path.name))}
        return dict(sorted(found.items()))

    @property
    def compiler_cache(self) -> Path:
        """Kernels of torch.compile, by kind of machine and node."""
        return self.path / "compiler-cache"

    @property
    def launches(self) -> Path:
        """Folder of the launch folders."""
        return self.path / "launches"

    def launch(self, number: int) -> Path:
        """Folder of launch *number* (from 1)."""
        return self.launches / f"{number:04d}"

    def launch_numbers(self) -> list[int]:
        """Numbers of the launches that exist, ascending."""
        if not self.launches.is_dir():
            return []
        return sorted(int(p.name) for p in self.launches.iterdir() if re.fullmatch(r"\d{4,}", p.name))

    @property
    def newest_launch(self) -> Path | None:
        """Folder of the newest launch; None if there was none."""
        numbers = self.launch_numbers()
        return self.launch(numbers[-1]) if numbers else None

    def generation_logs(self, generation: int) -> Path:
        """Folder of the rank logs of one generation."""
        return self.path / "logs" / f"g{generation:04d}"

    def rank_log(self, generation: int, rank: int, suffix: str = "jsonl") -> Path:
        """Log of one rank: *suffix* is `jsonl`, `stdout` or `stderr`."""
        return self.generation_logs(generation) / f"rank{rank}.{suffix}"


def make_runs_folder(folder: RunFolder) -> None:
    """Make `runs/`, in which *folder* lies, with a .gitignore for all of it; leave a folder that exists as it is."""
    runs = folder.path.parent.parent
    if runs.name != RUNS:
        return
    # Whatever is written there next tells why it cannot be.
    with suppress(OSError):
        runs.mkdir()
        (runs / ".gitignore").write_text(_GITIGNORE)


def path_from_root(uri: str) -> str | None:
    """Return the path in *uri* if it is relative to the project root; None if *uri* means the same in any folder."""
    path = re.sub(r"^(file|local)://", "", uri, flags=re.IGNORECASE)
    return None if "://" in path or "::" in path or path.startswith(("/", "~")) else path


def from_root(uri: str, root: Path) -> str:
    """Return *uri*, a relative path in it as a path below *root*."""
    relative = path_from_root(uri)
    return uri if relative is None else str(root / relative)


def snapshot_place(uri: str | None, folder: RunFolder, project_root: Path) -> tuple[str, str]:
    """Return the URI of the run's snapshots and the run's prefix under it.

    Without *uri* (`snapshots.uri`) the place is the run folder itself; a relative path starts at the project root.
    """
    if uri is None:
        return str(folder.path), ""
    return from_root(uri, project_root), f"{folder.run_id}/"


def recorded_place(folder: RunFolder) -> tuple[str, str]:
    """Return the place of the run's snapshots (`snapshot_place`) by the job of its newest launch, if that can be read."""
    uri = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(((folder.newest_launch or folder.path) / "job.json").read_text("utf-8"))
        uri = record["job"]["snapshots"]["uri"]
    return snapshot_place(uri if isinstance(uri, str) else None, folder, folder.project_root)


def step_of(name: str | None) -> int:
    """Return the step of the snapshot called *name*; 0 for None, or for a name that is not a snapshot's."""
    match = SNAPSHOT_NAME.fullmatch(name or "")
    return int(match["step"]) if match else 0


def snapshot_name(step: int, generation: int, id8: str) -> str:
    """Return a snapshot's folder name, unique for ever: `<step:012>-<generation:04>-<id8>`."""
    return f"{step:012d}-{generation:04d}-{id8}"


def generation_file(generation: int) -> str:
    """Return the name, under `<uri>/<run id>/`, of the file whose exclusive creation makes the generation exist."""
    return f"generations/{generation:04d}.json"


def launch_file(launch_id: str) -> str:
    """Return the name, beside the generations, of the file by which other machines see that they share the launch's place."""
    return f"generations/launch-{launch_id}"
