"""What `elasticflow doctor` looks at on this machine: real limits, lowered for real where a process may."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import pytest

from elasticflow.cli.main import group
from elasticflow.doctor.machine import machine
from elasticflow.doctor.network import network
from elasticflow.doctor.project import packages, project
from elasticflow.doctor.questions import needs_of
from elasticflow.doctor.store import stores
from elasticflow.doctor.torch_probe import _PROGRAM, TorchProbe
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from elasticflow.doctor.check import CheckResult, Needs


def _named(found: Iterable[CheckResult], name: str) -> CheckResult:
    return next(each for each in found if each.name == name)


def _wrong(found: Iterable[CheckResult]) -> dict[str, str]:
    return {each.name: each.verdict for each in found if each.verdict != "ok"}


def _needs(root: Path, **changes: Any) -> Needs:
    return needs_of(root, make_job(**changes))


def test_every_finding_that_is_not_well_says_what_it_means(tmp_path: Path) -> None:
    """A healthy machine has no problems; each warning has its meaning."""
    needs = needs_of(tmp_path)
    found = [*packages(), *machine(needs), *network(needs), *stores(needs), *project(needs)]
    assert "problem" not in _wrong(found).values()
    assert [] == [each for each in found if each.verdict != "ok" and not each.meaning]
    assert [] == list(tmp_path.iterdir())


def test_a_low_limit_of_file_handles(tmp_path: Path) -> None:
    """The soft limit counts, since a run inherits it; the remedy names a number that is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        found = _named(machine(_needs(tmp_path, dataset__num_workers=4)), "file handles")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ("problem", "ulimit -n 4096") == (found.verdict, found.remedy)
    assert found.fact.startswith("300, may be raised to")


def test_limits_of_a_container(tmp_path: Path) -> None:
    """The control group's limits of cores, memory and processes are what counts."""
    limits = {"cpu.max": "150000 100000", "memory.max": "900000000", "memory.current": "100000000"}
    for name, text in {**limits, "pids.max": "40", "pids.current": "30"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    needs = replace(needs_of(tmp_path), workers=2)
    found = list(machine(needs, cgroup=tmp_path))
    wrong = _wrong(found)
    assert ("warning", "problem") == (wrong["memory"], wrong["processes"])
    assert "10 more" == _named(found, "processes").fact
    is_cut = len(os.sched_getaffinity(0)) > 1  # 1.5 cores of one are no less
    assert is_cut == ("set nodes.nproc_per_node = 1, or" in _named(found, "cores").remedy)


def test_workers_of_a_machine_with_gpus(tmp_path: Path) -> None:
    """A worker for each GPU, of which a machine has far fewer than cores: handles and memory for these are enough."""
    for number in range(3):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    job = make_job(nodes__nproc_per_node="auto")
    assert needs_of(tmp_path, gpus=tmp_path / "gpus").workers == 3
    assert needs_of(tmp_path, job, gpus=tmp_path / "gpus").workers == 3
    on_cpu = make_job(nodes__nproc_per_node="auto", nodes__device="cpu")
    assert needs_of(tmp_path, on_cpu, gpus=tmp_path / "gpus").workers == len(os.sched_getaffinity(0))


def test_few_workers_in_a_container_with_few_cores(tmp_path: Path) -> None:
    """The limit is told, and is no reason to change anything."""
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    found = _named(machine(replace(_needs(tmp_path), workers=1), cgroup=tmp_path), "cores")
    assert (found.verdict, found.remedy) == ("ok", "")


def test_what_standby_workers_took_in_the_newest_run(tmp_path: Path) -> None:
    """Told where there is memory for them, else with what comes of it; nothing without a run that had some."""
    needs = replace(_needs(tmp_path), workers=2)
    assert needs.job is not None
    job_name = needs.job.job.name
    assert [] == [each for each in machine(needs) if each.name == "standby workers"]
    run = tmp_path / "runs" / job_name / "20261120-120000-0000"
    (run / "launches" / "0001").mkdir(parents=True)
    happened = {
        "event": "standbys.ready",
        "node": "n0",
        "pids": [7, 8],
        "seconds": 5.13,
        "memory": 32_400_000,
    }
    (run / "events.jsonl").write_text(json.dumps(happened) + "\n")
    found = _named(machine(needs), "standby workers")
    assert ("ok", "one takes 16.2 MB and 5.1 s to get ready (run 20261120-120000-0000)") == (
        found.verdict,
        found.fact,
    )
    for name, text in {"memory.max": "900000000", "memory.current": "860000000"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    found = _named(machine(needs, cgroup=tmp_path), "standby workers")
    assert ("warning", "2 workers would have none: 32.4 MB of 40.0 MB free memory is too much") == (
        found.verdict,
        found.meaning,
    )
    off = replace(_needs(tmp_path, restarts__warm="off"), workers=2)
    assert [] == [each for each in machine(off) if each.name == "standby workers"]


def test_no_shared_memory(tmp_path: Path) -> None:
    """Without its folder the GPUs of a machine cannot exchange data."""
    found = _named(machine(needs_of(tmp_path), shared=tmp_path / "none"), "shared memory")
    assert ("warning", "mount a tmpfs there") == (found.verdict, found.remedy)


def test_a_port_that_is_taken_and_one_that_is_free(tmp_path: Path) -> None:
    """The endpoint on this machine must be free; whoever listens there is in the way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        needs = _needs(tmp_path, nodes__endpoint=f"127.0.0.1:{port}", nodes__max=2)
        taken = _named(network(needs), "endpoint")
    assert "warning" == taken.verdict
    assert "Address already in use" in taken.fact
    assert "ok" == _named(network(needs), "endpoint").verdict
    served = _needs(tmp_path, nodes__endpoint=f"127.0.0.1:{port}", torchrun__rdzv_backend="etcd-v2")
    assert "problem" == _named(network(served), "endpoint").verdict  # nobody serves etcd there


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    """An interface that is not there, a host that has no address, an endpoint that is not named."""
    needs = _needs(tmp_path, nodes__endpoint="nowhere.invalid:29400", nodes__interface="eth99", nodes__max=2)
    found = list(network(needs))
    assert {"interface": "problem", "endpoint": "problem"} == _wrong(found)
    assert "nowhere.invalid is no address" in _named(found, "endpoint").fact
    assert "lo" in _named(found, "interface").remedy
    assert "warning" == _named(network(_needs(tmp_path, nodes__max=2)), "endpoint").verdict


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """The folder that would have to hold the snapshots is named, with the reason."""
    found = _named(stores(_needs(tmp_path, snapshots__uri="/proc/snapshots")), "snapshots")
    assert ("problem", "/proc/snapshots could not be made") == (found.verdict, found.meaning)
    assert found.fact.startswith("/proc: ")


def test_a_place_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    """A folder that does not exist yet is not made by looking; every probe is removed."""
    found = list(stores(_needs(tmp_path, snapshots__uri="store/mnist")))
    assert {} == {name: verdict for name, verdict in _wrong(found).items() if verdict == "problem"}
    assert "snapshots: locks" in {each.name for each in found}
    assert [] == list(tmp_path.iterdir())


def test_a_store_in_memory(tmp_path: Path) -> None:
    """What fsspec serves without a server is asked the same questions."""
    (found,) = [
        each
        for each in stores(_needs(tmp_path, snapshots__uri="memory://doctor"))
        if each.name == "snapshots"
    ]
    assert "ok" == found.verdict
    assert "memory://doctor is writable" in found.fact


def test_schema_beside_the_job(tmp_path: Path) -> None:
    """A schema that is missing, or of another version, is told with the command that mends it."""
    job_file = tmp_path / "job.toml"
    job_file.write_text("#:schema job.schema.json\n")
    needs = needs_of(tmp_path, make_job(), job_file)
    missing = _named(project(needs), "schema")
    (tmp_path / "job.schema.json").write_text("{}")
    other = _named(project(needs), "schema")
    remedy = f"elasticflow guide --schema job -o {tmp_path / 'job.schema.json'}"
    assert [("warning", remedy)] * 2 == [(each.verdict, each.remedy) for each in (missing, other)]
    assert "of another version" in other.fact


@pytest.mark.usefixtures("real_processes")
def test_runs_in_a_folder_that_git_sees(tmp_path: Path) -> None:
    """A folder that was there before the first run has no .gitignore of ours; the remedy adds one."""
    for words in (["init", "-q"], ["config", "core.excludesFile", "/dev/null"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    needs = needs_of(tmp_path)
    assert "warning" not in _wrong(project(needs)).values()
    (tmp_path / "runs").mkdir()
    (found,) = [each for each in project(needs) if each.verdict == "warning"]
    assert found.remedy is not None
    subprocess.run(found.remedy, shell=True, check=True)
    assert "warning" not in _wrong(project(needs)).values()


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("program", "fact"),
    [
        ("import time; time.sleep(60)", "not imported within 0.3 s"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    ],
)
def test_a_torch_that_is_broken(tmp_path: Path, program: str, fact: str) -> None:
    """An import that hangs or fails is a finding, and the process is gone."""
    waited: list[str] = []
    probe = TorchProbe([sys.executable, "-S", "-c", program])
    (found,) = probe.results(needs_of(tmp_path), waited.append, limit_s=0.3 if "sleep" in program else 30)
    assert "problem" == found.verdict
    assert fact in found.fact
    assert found.remedy


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("told", "changes", "expected"),
    [
        ({}, {}, {}),
        ({"version": "2.15.0"}, {}, {}),
        ({"version": "2.9.0"}, {}, {"torch": "warning"}),
        ({}, {"nodes__nproc_per_node": "gpu"}, {"devices": "problem"}),
        ({"error": "RuntimeError: driver too old"}, {}, {"devices": "warning"}),
        ({"kind": "cuda", "devices": ["H100"]}, {}, {"backends": "problem"}),
        ({"kind": "cuda", "nccl": True, "devices": ["H100"], "untried": ["H100"]}, {}, {}),
        ({"kind": "cuda", "nccl": True, "untried": ["H100"]}, {}, {"devices": "warning"}),
        ({"kind": "xpu", "nccl": True, "devices": ["Max 1550"]}, {}, {"backends": "problem"}),
    ],
)
def test_what_torch_tells(
    tmp_path: Path, told: dict[str, Any], changes: dict[str, Any], expected: dict[str, str]
) -> None:
    """Versions, devices and backends are weighed by what the job needs."""
    assert expected == _wrong(_told(tmp_path, told, **changes))


def _told(root: Path, told: dict[str, Any], **changes: Any) -> list[CheckResult]:
    facts: dict[str, Any] = {
        "version": "2.13.0",
        "cuda": None,
        "hip": None,
        "seconds": 1.0,
        "gloo": True,
        "nccl": False,
        "xccl": False,
    }
    facts |= {"error": None, "kind": None, "devices": [], "untried": [], **told}
    probe = TorchProbe([sys.executable, "-S", "-c", f"import json; print(json.dumps({facts!r}))"])
    return list(probe.results(_needs(root, **changes), lambda _: None))


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("wanted", "told", "expected", "fact"),
    [
        ("cuda", {}, {"devices": "problem"}, 'no "cuda" device'),
        (
            "xpu",
            {"kind": "cuda", "nccl": True, "devices": ["H100"]},
            {"devices": "problem"},
            'no "xpu" device, but 1 GPU: H100 ("cuda")',
        ),
        ("cuda", {"kind": "cuda", "devices": ["H100"], "nccl": True}, {}, "1 GPU: H100"),
        (
            "cuda",
            {"error": "RuntimeError: driver too old"},
            {"devices": "problem"},
            "RuntimeError: driver too old",
        ),
        (
            "cpu",
            {"kind": "cuda", "devices": ["H100"]},
            {},
            '1 GPU: H100, hidden: workers run on the CPU, as nodes.device = "cpu" says',
        ),
        ("cpu", {}, {}, 'workers run on the CPU, as nodes.device = "cpu" says'),
        ("cpu", {"error": "RuntimeError: driver too old"}, {}, "workers run on the CPU, as"),
    ],
)
def test_device_that_the_job_names(
    tmp_path: Path, wanted: str, told: dict[str, Any], expected: dict[str, str], fact: str
) -> None:
    """A type that the machine lacks is a problem; the devices and backends of a job on the CPU are the CPU's."""
    found = _told(tmp_path, told, nodes__device=wanted)
    assert expected == _wrong(found)
    assert _named(found, "devices").fact.startswith(fact)


TORCH = """
import pathlib, sys
__version__ = "2.13.0"
class version: cuda, hip = {build}
class accelerator:
    current_accelerator = staticmethod(lambda check_available: type("device", (), {{"type": "cuda"}}))
    device_count = staticmethod(lambda: 3)
class Module:
    default_generators = ()
    get_device_name = staticmethod(lambda number: f"GPU {{number}}")
    get_device_properties = staticmethod(lambda number: type("properties", (), {{"uuid": "abc"[number]}}))
    device_memory_used = staticmethod(lambda number: number << 30)
    utilization = staticmethod(lambda number: 0)
def get_device_module(device):
    return Module
class ones:
    def __init__(self, size, device):
        with pathlib.Path({opened!r}).open("a") as file: file.write(device + " ")
    add_ = lambda self, _: self
    item = lambda self: 2
"""


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("build", "answer", "tried", "fact"),
    [
        (
            ("13.0", None),
            "GPU-a, 3, 0\nGPU-b, 71000, 97\nGPU-c, 3, 12",
            "cuda:0 ",
            "1 GPU: GPU 0; 2 GPUs: GPU 1, GPU 2 not tried",
        ),
        (
            ("13.0", None),
            "GPU-a, 3, 0\nGPU-b, 3, 0\nGPU-c, 3, 0",
            "cuda:0 cuda:1 cuda:2 ",
            "3 GPUs: GPU 0, GPU 1, GPU 2",
        ),
        (("13.0", None), "GPU-a, [N/A], [N/A]\nGPU-b, 3, [N/A]", "", "3 GPUs: GPU 0, GPU 1, GPU 2 not tried"),
        (("13.0", None), "NVIDIA-SMI has failed", "", "3 GPUs: GPU 0, GPU 1, GPU 2 not tried"),
        ((None, "6.4"), "", "cuda:0 ", "1 GPU: GPU 0; 2 GPUs: GPU 1, GPU 2 not tried"),
    ],
)
def test_a_gpu_is_tried_only_where_its_driver_says_that_it_is_idle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: tuple[str | None, str | None],
    answer: str,
    tried: str,
    fact: str,
) -> None:
    """A try makes a context, which takes memory; torch and nvidia-smi are stand-ins."""
    (tmp_path / "torch").mkdir()
    opened = tmp_path / "opened"
    opened.touch()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH.format(build=build, opened=str(opened)))
    (tmp_path / "torch" / "distributed.py").write_text(
        "def is_available(): return True\nis_gloo_available = is_nccl_available = is_available"
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'EOF'\n{answer}\nEOF\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(TorchProbe([sys.executable, "-c", _PROGRAM]).results(needs_of(tmp_path), lambda _: None))
    assert tried == opened.read_text()
    assert _named(found, "devices").fact.startswith(fact)
    assert "nccl" in _named(found, "backends").fact


def test_without_torch_the_commands_that_work_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name is one of a command."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (torch,) = TorchProbe().results(_needs(tmp_path), lambda _: None)
    names = re.findall(r"\w+", torch.meaning.partition(";")[2])
    assert set(names) - {"and", "work"} <= set(group.list_commands(click.Context(group)))
