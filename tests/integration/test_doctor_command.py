"""`elasticflow doctor` where something is wrong for real: limits, packages, disks, stores."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import s3fs

import elasticflow
from elasticflow.doctor.machine import machine
from elasticflow.doctor.questions import needs_of
from elasticflow.doctor.store import stores
from tests import fenced_blocks
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

ROOT = Path(elasticflow.__file__).parents[1]
CORE = (
    *("annotated_types", "click", "fsspec", "psutil", "pydantic", "pydantic_core", "structlog", "tomli"),
    *("typing_extensions.py", "typing_inspection"),
)


def _found(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_a_low_limit_is_inherited(tmp_path: Path) -> None:
    """The whole command under `ulimit -n`: exit 1, the rest is well, and nothing is left behind."""
    words = f"ulimit -n 200; exec {sys.executable} -m elasticflow doctor --format json"
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = _found(done)
    assert (1, "problem") == (done.returncode, found["file handles"]["verdict"])
    assert "ok" == found["torch"]["verdict"]
    assert ["file handles"] == [name for name, each in found.items() if each["verdict"] == "problem"]
    assert [] == list(tmp_path.iterdir())


def test_an_environment_without_torch_and_extras(tmp_path: Path) -> None:
    """Only what a pre-commit hook installs: torch, numpy and s3fs are missing, each with what to install."""
    packages = tmp_path / "site"
    packages.mkdir()
    for name in CORE:
        (packages / name).symlink_to(
            next(p for s in site.getsitepackages() if (p := Path(s) / name).exists())
        )
    for place in map(Path, site.getsitepackages()):  # what compiled packages share
        for shared in place.glob("*__mypyc*"):
            (packages / shared.name).symlink_to(shared)
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.toml").write_text(
        '[job]\nname = "small"\n[model]\nentry = "pieces:Net"\nloss = "pieces:loss"\n'
        '[optimizer]\nentry = "pieces:optimizer"\n[dataset]\nentry = "pieces:digits"\nglobal_batch_size = 8\n'
        '[train]\nepochs = 1\n[snapshots]\nuri = "s3://bucket/small"\n'
    )
    (project / "pieces.py").write_text(
        "def Net(): ...\ndef loss(a, b): ...\ndef optimizer(parameters): ...\ndef digits(): ...\n"
    )
    program = f"import sys; sys.path[1:1] = [{str(ROOT)!r}, {str(packages)!r}]; from elasticflow.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, "doctor", "job.toml", "--format", "json"],
        cwd=project,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = _found(done)
    assert 1 == done.returncode
    assert {"torch", "numpy", "safetensors", "snapshots"} == {
        name for name, each in found.items() if each["verdict"] == "problem"
    }
    assert 'pip install "elasticflow[s3]"' == found["snapshots"]["remedy"]
    assert "pip install 'elasticflow[torch]'" == found["torch"]["remedy"]


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of its own with 128 kB, or skip where mounting is not permitted."""
    place = tmp_path / "little"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(little_disk: Path, tmp_path: Path) -> None:
    """No space for a probe is told as what it is; a little space, and memory, as such too; nothing is left."""
    needs = needs_of(tmp_path, make_job(snapshots__uri=str(little_disk)))
    found = {each.name: each for each in stores(needs)}
    assert ("ok", "problem", "warning") == tuple(
        found[name].verdict for name in ("snapshots", "snapshots: space", "snapshots: system")
    )
    shared = {each.name: each for each in machine(needs_of(tmp_path), shared=little_disk)}["shared memory"]
    assert "warning" == shared.verdict
    assert "--shm-size" in shared.remedy

    (little_disk / "filler").write_bytes(b"x" * 131_072)
    full = {each.name: each for each in stores(needs)}["snapshots"]
    assert "problem" == full.verdict
    assert "No space left on device" in full.fact
    assert ["filler"] == [each.name for each in little_disk.iterdir()]


def test_a_bucket_of_the_hub_by_the_lines_of_the_guide(
    s3_bucket: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner before the bucket, in a path: the address reaches the store, and doctor sees what it can do."""
    [block] = [each for each in fenced_blocks.blocks() if "https://s3.hf.co/OWNER" in each.text]
    options = tomllib.loads(block.text)["snapshots"]["options"]
    options["endpoint_url"] = options["endpoint_url"].replace("https://s3.hf.co/OWNER", f"{s3_server}/owner")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    job = make_job(snapshots__uri=f"s3://{s3_bucket}/small", snapshots__options=options)
    assert "ok" == {each.name: each for each in stores(needs_of(tmp_path, job))}["snapshots"].verdict


def test_a_bucket_that_is_there_and_one_that_is_not(s3_bucket: str, tmp_path: Path) -> None:
    """Written, made once, compared with the server's clock and removed again; else the reason and what to check."""
    job = make_job(snapshots__uri=f"s3://{s3_bucket}/small")
    good = {each.name: each for each in stores(needs_of(tmp_path, job))}
    assert "ok" == good["snapshots"].verdict
    assert "snapshots: clock" not in good
    assert [] == s3fs.S3FileSystem(skip_instance_cache=True).find(s3_bucket)

    job = make_job(snapshots__uri="s3://no-such-bucket-here/small")
    bad = {each.name: each for each in stores(needs_of(tmp_path, job))}["snapshots"]
    assert "problem" == bad.verdict
    assert "bucket" in bad.fact
    assert "credentials" in bad.remedy
