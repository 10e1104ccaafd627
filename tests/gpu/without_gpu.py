"""Runs jobs under the pretended driver and writes a table: which process opens the device, and how each run ends.

`without_gpu.sh` makes the environment for it. Exit code: 0 if every row is as it should be, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from tests.end_to_end.harness import ROOT, Running, named, project_at, read_lines
from tests.gpu import small_job
from tests.gpu.measure import ended_as, printed_by

if TYPE_CHECKING:
    from collections.abc import Callable

_PRETENDED = Path(__file__).with_name("pretended")
_LIMIT_S, _TESTS_LIMIT_S = 240, 900
_MOST_CHARACTERS = 200
_MIG = "MIG-00000000-0000-0000-0000-000000000000"

# At step 12 of two generations: the second one goes on from the snapshot of step 10, once that is written.
_ECC = """
    times = len(list(Path().glob("ecc-*")))
    if times < 2 and _calls == (12, 2)[times]:
        time.sleep(1)
        Path(f"ecc-{times}").touch()
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
"""
_TF32 = """
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
"""


@dataclass(frozen=True)
class Seen:
    """A row's outcome, in words, and whether it is as it should be."""

    words: str
    is_right: bool


@dataclass
class Launched:
    """A run under the pretended driver that has ended, or was ended at the time limit."""

    exit_code: int | None
    events: list[dict[str, Any]]
    output: str
    # Initialisations of CUDA, in order, as the pretended driver logged them.
    inits: list[dict[str, Any]]

    def in_fork_server(self) -> int:
        """Return how often the process from which workers are forked has initialised CUDA; standbys are its children."""
        by_server = [init for init in self.inits if init["command"][0].endswith("fork_server/server.py")]
        return sum("stand_by" not in init["by"] for init in by_server)

    def devices(self) -> list[str]:
        """Return the device on which each generation trained."""
        return [event["device"] for event in named(self.events, events.TRAINING_STARTED)]

    def end(self) -> str:
        """Return the exit code, and the reason of a failure in the words of the command."""
        said = re.findall(r"(?:✗ (?:failed|worker failed) +|error\S*: )(.*)", self.output)
        ended = "does not end in time" if self.exit_code is None else f"exit code {self.exit_code}"
        reason = re.sub(r" \(pid \d+\)", "", said[0].strip())[:_MOST_CHARACTERS] if said else ""
        return ended + (f": {reason}" if self.exit_code and reason else "")

    def words(self) -> str:
        """Return the outcome as a row has it."""
        first = next(iter(self.inits), None)
        opened = "no process initialises CUDA"
        if first is not None:
            stack = [
                name for name, _ in groupby(first["by"]) if not name.startswith(("_lazy", "_call_with", "<"))
            ]
            where = "the fork server" if self.in_fork_server() else Path(first["command"][0]).name
            opened = f"first initialisation in {where}: {' < '.join(stack[:3])}"
        trained = ", then ".join(self.devices())
        return f"{self.end()}; {f'trained on {trained}; ' if trained else ''}{opened}"


@dataclass
class JobLauncher:
    """Starts jobs under the pretended driver.

    Attributes:
        folder: Each launch gets a folder below it.
        nvml: Folder of the pretended `libnvidia-ml.so.1`.
        product: Checkout whose elasticflow runs.
    """

    folder: Path
    nvml: Path
    product: Path

    def launch(
        self,
        *sets: str,
        at_import: str = "",
        in_loss: str = "pass",
        during: Callable[[Running], None] | None = None,
        nvml: bool = True,
        gpus: int = 1,
        **environment: str,
    ) -> Launched:
        """Run the small job with *sets* of `--set`, and return how it ended; *during* is called once it has started."""
        root = self.folder / os.urandom(4).hex()
        log = root / "inits.jsonl"
        environment = self.environment(nvml=nvml) | {
            "PRETENDED_GPUS": str(gpus),
            "PRETENDED_LOG": str(log),
            **environment,
        }
        with project_at(root) as project:
            small_job.write(project, at_import=at_import, in_loss=in_loss, is_slow=during is not None)
            running = project.run(small_job.FILE, root.name, *sets, job=small_job.NAME, **environment)
            with suppress(subprocess.TimeoutExpired):
                # It fails when the run ends too early: the exit code is told below.
                with suppress(pytest.fail.Exception):
                    if during is not None:
                        during(running)
                small_job.hurry(project)
                running.process.wait(_LIMIT_S)
            code = running.process.poll()
            return Launched(code, running.events(), running.output.read_text(), read_lines(log))

    def environment(self, *, nvml: bool, driver: bool = True) -> dict[str, str]:
        """Return the variables that put the pretended driver below torch; of the real one's kind there is none."""
        return {
            "LD_LIBRARY_PATH": str(self.nvml) if nvml else "",
            "PYTHONPATH": os.pathsep.join([*([str(_PRETENDED)] if driver else []), str(self.product)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }


def plain(jobs: JobLauncher) -> Seen:
    """A forked worker opens the device in `choose_device`, and trains."""
    return _trained(jobs.launch())


def killed(jobs: JobLauncher) -> Seen:
    """The only worker is killed after a snapshot: a standby, which has the device open, goes on to the end."""
    return _trained(jobs.launch(during=partial(_kill, rank=0)), generations=2)


def two_workers(jobs: JobLauncher) -> Seen:
    """Two workers, a device each, and rank 1 is killed: gloo stands in for nccl."""
    sets = ("nodes.nproc_per_node=2",)
    return _trained(jobs.launch(*sets, gpus=2, during=partial(_kill, rank=1)), generations=2)


def compiled(jobs: JobLauncher) -> Seen:
    """`train.compile = true`: the fork server readies the compiler and opens no device."""
    return _trained(jobs.launch("train.compile=true"))


def mig(jobs: JobLauncher) -> Seen:
    """NVML cannot count ids of MIG, and the driver is asked: not in the process that forks."""
    return _trained(jobs.launch(CUDA_VISIBLE_DEVICES=_MIG))


def without_nvml(jobs: JobLauncher) -> Seen:
    """Without the library the driver is asked: not in the process that forks."""
    return _trained(jobs.launch(nvml=False))


def asked_at_import(jobs: JobLauncher) -> Seen:
    """A module that only asks for the device at import is shared by forked workers."""
    launched = jobs.launch(at_import="AVAILABLE = torch.cuda.is_available()")
    return _shared(launched, is_shared=True)


def opened_at_import(jobs: JobLauncher) -> Seen:
    """A module that opens the device at import is not shared: each worker is started anew, and trains."""
    return _shared(jobs.launch(at_import='TENSOR = torch.zeros(1, device="cuda")'), is_shared=False)


def counted(jobs: JobLauncher) -> Seen:
    """`nproc_per_node = "gpu"` with two devices: two workers, a device each."""
    launched = jobs.launch("nodes.nproc_per_node=gpu", gpus=2)
    seen = _trained(launched)
    sizes = [event["world_size"] for event in named(launched.events, events.TRAINING_STARTED)]
    return Seen(f"{seen.words}; {sizes[0] if sizes else 'no'} workers", seen.is_right and sizes == [2])


def own_keys(jobs: JobLauncher) -> Seen:
    """The job's own keys: `train.tf32 = true` and `nodes.device = "cuda"`."""
    return _trained(jobs.launch("train.tf32=true", "nodes.device=cuda"))


def loader_processes(jobs: JobLauncher) -> Seen:
    """`dataset.num_workers = 2`: a thread pins the batches, which are moved one ahead; the device is opened before they start."""
    return _trained(jobs.launch("dataset.num_workers=2"))


def half(jobs: JobLauncher) -> Seen:
    """One device for two workers is refused by name; the CPU never stands in for it."""
    launched = jobs.launch("nodes.nproc_per_node=2")
    is_named = (
        re.search(r"\b(1|one) (visible )?(GPU|device|accelerator|CUDA device)", launched.output) is not None
    )
    return Seen(launched.words(), launched.exit_code not in {0, None} and is_named and not launched.devices())


def precision(jobs: JobLauncher) -> Seen:
    """TF32 by `fp32_precision`, on for products of matrices and off for convolutions."""
    return _trained(jobs.launch(at_import=_TF32))


def ecc(jobs: JobLauncher) -> Seen:
    """An ECC error in two generations at the same step: the device's fault, charged, never final, and no snapshot is blamed."""
    launched = jobs.launch(in_loss=_ECC)
    classes = [event["class"] for event in named(launched.events, events.GENERATION_ENDED)]
    blamed = len(named(launched.events, events.SNAPSHOT_REJECTED))
    is_right = "user_error" not in classes and classes.count("device") == 2 and not blamed
    told = f"classes {', '.join(classes)}; {blamed} snapshots set aside; {launched.end()}"
    return Seen(told, is_right and launched.exit_code == 0)


def poison(jobs: JobLauncher) -> Seen:
    """Torch as it is, without the pretended driver: in which cases `is_available()` spoils later forks."""
    ways = {
        "NVML there": (True, {}),
        "id of MIG": (True, {"CUDA_VISIBLE_DEVICES": _MIG}),
        "no NVML": (False, {}),
    }
    found = {}
    for way, (nvml, more) in ways.items():
        environment = (
            jobs.environment(nvml=nvml, driver=False) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | more
        )
        found[way] = printed_by(sys.executable, "-c", _POISON, environment={**os.environ, **environment})
    expected = {"NVML there": "False", "id of MIG": "True", "no NVML": "True"}
    return Seen(", ".join(f"{way}: {bad}" for way, bad in found.items()), found == expected)


_POISON = """
import os, torch
torch.cuda.is_available()
if (pid := os.fork()) == 0:
    print(torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def gpu_tests(jobs: JobLauncher) -> Seen:
    """The tests for a GPU that launch jobs: the code of a test must not run for the first time on a lent machine."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *_LAUNCHING]
    # A pretended id of MIG has a device behind it; fp32 stands for the precisions, of which kernels make the difference.
    command += ["-k", "not mig and not bf16 and not fp16", f"--basetemp={jobs.folder / 'tests'}"]
    environment = {**os.environ, **jobs.environment(nvml=True), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    log = jobs.folder / "tests.log"
    with log.open("w") as stream:
        ended = ended_as(command, stream.fileno(), _TESTS_LIMIT_S, environment)
    lines = log.read_text().splitlines()
    broken = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Seen("; ".join([f"exit code {ended}", *lines[-1:], *broken]), ended == "0")


_LAUNCHING = ("tests/gpu/test_launches.py", "tests/gpu/test_main_job.py")


def _trained(launched: Launched, generations: int = 1) -> Seen:
    """Judge a run that should train on the device to its end, with no initialisation in the fork server."""
    devices = launched.devices()
    is_on_device = len(devices) == generations and all(device.startswith("cuda") for device in devices)
    is_right = launched.exit_code == 0 and is_on_device and not launched.in_fork_server()
    return Seen(launched.words(), is_right)


def _shared(launched: Launched, *, is_shared: bool) -> Seen:
    """Judge a run whose module is, or is not, imported once for all workers."""
    refused = [event["reason"] for event in named(launched.events, events.PRELOAD_REFUSED)]
    seen = _trained(launched) if is_shared else Seen(launched.words(), launched.exit_code == 0)
    words = f"not shared: {refused[0]}" if refused else "module shared by forked workers"
    return Seen(f"{seen.words}; {words}", seen.is_right and bool(refused) is not is_shared)


def _kill(running: Running, rank: int) -> None:
    running.wait_for_step(small_job.EVERY + 2)
    running.wait_for("standbys", lambda: named(running.events(), events.STANDBYS_READY))
    os.kill(running.pid_of(rank), signal.SIGKILL)


# With the number of the finding that each is about, of issue 31.
ROWS: dict[str, tuple[str, Callable[[JobLauncher], Seen]]] = {
    "plain": ("A1: the control", plain),
    "compiled": ("A1", compiled),
    "mig": ("A2", mig),
    "without_nvml": ("A2", without_nvml),
    "poison": ("A2: what torch does", poison),
    "precision": ("A3", precision),
    "own_keys": ("A3", own_keys),
    "loader_processes": ("B: batches moved ahead", loader_processes),
    "half": ("A5", half),
    "counted": ("A5", counted),
    "ecc": ("A6", ecc),
    "asked_at_import": ("B6", asked_at_import),
    "opened_at_import": ("B6: the control", opened_at_import),
    "killed": ("D: a kill, a standby", killed),
    "two_workers": ("D: W = 2", two_workers),
    "tests": ("D: the tests themselves", gpu_tests),
}


def tried(row: str, jobs: JobLauncher) -> Seen:
    """Return the outcome of *row*; a check that breaks is told, too."""
    began = time.monotonic()
    try:
        seen = ROWS[row][1](jobs)
    except Exception as error:  # noqa: BLE001  the other rows are worth having
        seen = Seen(f"{type(error).__name__}: {error}", is_right=False)
    print(
        f"{row}: {'as it should be' if seen.is_right else 'WRONG'}, {time.monotonic() - began:.0f} s: {seen.words}"
    )
    return seen


def table(bound_to: dict[str, str], before: dict[str, str], now: dict[str, Seen]) -> str:
    """Return the table as Markdown."""
    wrong = [row for row, seen in now.items() if not seen.is_right]
    lines = ["# The CUDA path without a GPU", ""]
    lines += [", ".join(f"{name}: {value}" for name, value in bound_to.items()) + ".", ""]
    lines += [
        "Under a pretended driver (`tests/gpu/pretended/`): tensors of the device are the CPU's, and gloo stands in for nccl.",
        "So the rows say which process opens the device, and how runs end; they say nothing about kernels, bits and times.",
        "",
        f"{len(now) - len(wrong)} of {len(now)} rows are as they should be.",
        "",
        "| finding | check | before | now | |",
        "|---|---|---|---|---|",
    ]
    for row, seen in now.items():
        finding, check = ROWS[row]
        verdict = "as it should be" if seen.is_right else "WRONG"
        asked = (check.__doc__ or "").strip().replace("\n", " ")
        lines.append(
            f"| {finding} | `{row}`: {asked} | {_cell(before.get(row, ''))} | {_cell(seen.words)} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def earlier(path: Path) -> dict[str, str]:
    """Return the column `before` of the table at *path*, by row; nothing if there is none."""
    if not path.exists():
        return {}
    cells = [
        re.split(r"(?<!\\) \| ", line.strip("|\n "))
        for line in path.read_text().splitlines()
        if line.startswith("|")
    ]
    rows = [(re.match(r"`(\w+)`", row[1]), row[2]) for row in cells if len(row) >= 4]
    return {match[1]: before.strip().replace("\\|", "|") for match, before in rows if match}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Try all rows, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nvml", type=Path, required=True, help="folder of the pretended libnvidia-ml.so.1")
    parser.add_argument("--before", type=Path, help="checkout whose product gives the column before")
    parser.add_argument("--table", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--tests", action="store_true", help="try the row `tests`, too, which takes minutes")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="rows to try")
    options = parser.parse_args()
    began = time.monotonic()
    rows = options.only or [row for row in ROWS if row != "tests" or options.tests]
    before = earlier(options.table)
    with tempfile.TemporaryDirectory(prefix="elasticflow-") as folder, ThreadPoolExecutor(2) as pool:
        if options.before is not None:
            jobs = JobLauncher(Path(folder), options.nvml, options.before.resolve())
            earlier_rows = [row for row in rows if row != "tests"]  # they are this checkout's
            found = zip(earlier_rows, pool.map(partial(tried, jobs=jobs), earlier_rows), strict=True)
            before |= {row: seen.words for row, seen in found}
        jobs = JobLauncher(Path(folder), options.nvml, ROOT)
        now = dict(zip(rows, pool.map(partial(tried, jobs=jobs), rows), strict=True))
    bound_to = facts() | {"seconds": f"{time.monotonic() - began:.0f}"}
    if options.before is not None:
        bound_to["before"] = printed_by("git", "rev-parse", "--short", "HEAD", folder=options.before)
    text = table(bound_to, before, now)
    options.table.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(seen.is_right for seen in now.values()) else 1


def facts() -> dict[str, str]:
    """Return the date, the commit and the versions that the table is bound to, by name."""
    is_changed = bool(printed_by("git", "status", "--porcelain", "--untracked-files=no"))
    versions = json.loads(printed_by(sys.executable, "-c", _VERSIONS))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": printed_by("git", "rev-parse", "--short", "HEAD") + (" and changes" if is_changed else ""),
        "torch": f"{versions['torch']}, built for CUDA {versions['cuda']}",
        "Python": sys.version.split()[0],
        "files of the driver in /dev": "pretended" if Path("/dev/nvidiactl").exists() else "none",
    }


_VERSIONS = "import json, torch; print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda}))"


if __name__ == "__main__":
    sys.exit(main())
