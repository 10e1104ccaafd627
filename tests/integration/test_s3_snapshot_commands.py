"""`elasticflow snapshots` on a bucket of a real S3 server on loopback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file
from torch import nn

from elasticflow.cli.main import call
from tests.snapshots.conftest import Bench
from tests.snapshots.taking import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

Ran = tuple[int, str, str]


@pytest.fixture
def bucket(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A run of three snapshots under `s3://<bucket>/mnist`; the working folder is an empty project."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    bench = Bench(f"s3://{s3_bucket}/mnist", prefix="run/")
    bench.catalog.claim_generation({"launch": 1, "reason": "start"})
    client = bench.connect(bench.writer(keep_last=100))
    training = Training(model=nn.Linear(4, 4))
    for step in (10, 20, 30):
        training.steps = step
        training.take([client])
    yield bench
    bench.close()


@pytest.fixture
def ran(bucket: Bench, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs `elasticflow snapshots COMMAND URL ...`."""

    def run(command: str, *arguments: str, uri: str = f"{bucket.uri}/run") -> Ran:
        code = call(["snapshots", command, uri, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_life_in_a_bucket(ran: Callable[..., Ran], bucket: Bench, tmp_path: Path) -> None:
    """Listed, shown, verified, pinned, exported and pruned by URL alone, credentials from the environment."""
    steps = [each.step for each in bucket.catalog.committed()]
    _, out, _ = ran("list", "--json")
    assert steps == [each["step"] for each in json.loads(out)] == [30, 20, 10]
    assert "generation 1  1 worker, start, from the beginning, launch 1" in ran("show", "step:10")[1]
    assert 0 == ran("verify", "--all")[0]
    assert 0 == ran("pin", "step:10", "--note", "first")[0]
    assert 0 == ran("export", "--format", "safetensors", "-o", "out.safetensors")[0]
    assert {"weight", "bias"} == set(load_file(tmp_path / "out.safetensors"))
    bucket.catalog.storage.write(f"run/snapshots/{bucket.name_of(5, 0)}/shard", (b"half",))
    code, out, _ = ran("prune", "--keep-last", "1", "--yes", "--json")
    facts = json.loads(out)
    assert (0, [bucket.name_of(20), bucket.name_of(5, 0)]) == (code, facts["removed"])
    assert [30, 10] == [each.step for each in bucket.catalog.committed()]


def test_damage_in_a_bucket(ran: Callable[..., Ran], bucket: Bench) -> None:
    """A byte flipped behind everybody's back: found, named, set aside."""
    name = bucket.name_of(30)
    path = f"run/snapshots/{name}/shard-00000-of-00001.safetensors"
    data = bucket.catalog.storage.read(path)
    bucket.catalog.storage.write(path, (data[:-1] + bytes([data[-1] ^ 1]),))
    code, out, _ = ran("verify", "--quarantine")
    assert 1 == code
    assert "damaged  shard-00000-of-00001.safetensors: block 0 (from byte 0) is not what was written" in out
    assert [name] == list(bucket.catalog.quarantined())


def test_options_reach_the_file_system(
    ran: Callable[..., Ran], bucket: Bench, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment says nothing, --option does; nested keys with dots."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    code, out, _ = ran("list", "--json", "--option", f"client_kwargs.endpoint_url={s3_server}")
    assert (0, 3) == (code, len(json.loads(out)))


def test_a_bucket_that_is_not_there(ran: Callable[..., Ran]) -> None:
    """Exit code 2, one line, a remedy."""
    code, out, err = ran("list", uri="s3://no-such-bucket-anywhere/run")
    assert (2, "") == (code, out)
    assert err.startswith("error: ")
    assert err.count("\n") == 2
