"""URIs that name no place are refused with the URI that was meant; whatever fsspec may know passes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG = {
    "s3:/bucket/x": "s3://bucket/x",
    "s3:bucket/x": "s3://bucket/x",
    "s3//bucket/x": "s3://bucket/x",
    "s3:///bucket/x": "s3://bucket/x",
    "GS:/bucket": "GS://bucket",
    "s4://bucket/x": "s3://bucket/x",
    "s3n://bucket": "s3://bucket",
    "s3://": "s3://bucket/name",
    "file:/data/x": "file:///data/x",
    "$HOME/x": "${env:HOME}/x",
    "s3://$BUCKET/x": "s3://${env:BUCKET}/x",
    "%USERPROFILE%/x": "${env:HOME}/x",
    " s3://bucket": "s3://bucket",
    "simplecache::s3:/bucket": "s3://bucket",
}
GOOD = [
    "s3://bucket/x", "gs://b", "az://c/x", "sftp://me@host/x", "file:///data", "file://data", "/data/x", "data/x", "~/x", ".", "data:old/x",
    "oss://bucket/x", "hdfs://host/x", "simplecache::s3://bucket/x", "S3://bucket/x", "s3", "${env:ROOT}/x", "s3://${env:B}/x", "a$/b",
    "sftp://me:pa$word@host/x", "${env:ROOT:-$}/x",
]  # fmt: skip


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Return what gives code and help of all errors about a job with a value in a table."""
    monkeypatch.chdir(tmp_path)

    def said(table: str, key: str, value: str) -> list[tuple[str, str]]:
        Path("job.toml").write_text(f"[{table}]\n{key} = '{value}'\n", "utf-8")
        found = load_job(Path("job.toml")).diagnostics
        return [(each.code, each.help or "") for each in found if each.severity == "error" and each.line == 2]

    return said


@pytest.mark.parametrize("uri", WRONG)
def test_a_uri_that_names_no_place_is_refused_with_what_was_meant(
    said: Callable[..., list[tuple[str, str]]], uri: str
) -> None:
    """Before, `s3:/bucket` was a folder called "s3:", and $HOME one called "$HOME"."""
    [(code, remedy)] = said("snapshots", "uri", uri)
    assert code == codes.NO_SUCH_PLACE
    assert f'"{WRONG[uri]}"' in remedy


@pytest.mark.parametrize("uri", GOOD)
def test_any_place_there_may_be_passes(said: Callable[..., list[tuple[str, str]]], uri: str) -> None:
    """Paths, URLs of fsspec's, references and a home folder, which the storage expands."""
    assert said("snapshots", "uri", uri) == []


def test_an_unknown_protocol_is_told_which_there_are(said: Callable[..., list[tuple[str, str]]]) -> None:
    """And which extra each needs."""
    [(code, remedy)] = said("snapshots", "uri", "quux://bucket")
    assert code == codes.NO_SUCH_PLACE
    for word in ("s3://", "elasticflow[s3]", "gs://", "elasticflow[gcs]", "az://", "sftp://"):
        assert word in remedy


@pytest.mark.parametrize("uri", ["hf://buckets/me/b/mnist", "hf://me/model"])
def test_the_hub_is_a_place_by_its_s3_interface(said: Callable[..., list[tuple[str, str]]], uri: str) -> None:
    """The commit of a snapshot needs exclusive creation, which its own protocol lacks; weights may be read from it."""
    [(code, remedy)] = said("snapshots", "uri", uri)
    assert code == codes.NO_SUCH_PLACE
    assert "as S3: `elasticflow guide snapshots`" in remedy
    assert said("model", "weights", "hf://me/model/model.safetensors") == []


def test_weights_and_logs_have_no_home_folder(said: Callable[..., list[tuple[str, str]]]) -> None:
    """Only the snapshots' place expands it."""
    meant = 'write weights = "${env:HOME}/w.safetensors"'
    assert said("model", "weights", "~/w.safetensors")[0] == (codes.NO_SUCH_PLACE, meant)
    assert said("torchrun", "log_dir", "~/logs")[0] == (
        codes.NO_SUCH_PLACE,
        'write log_dir = "${env:HOME}/logs"',
    )


def test_no_password_is_repeated(said: Callable[..., list[tuple[str, str]]]) -> None:
    """The URI that was meant is shown without it."""
    assert "hunter2" not in str(said("snapshots", "uri", "s4://me:hunter2@bucket"))


@pytest.mark.parametrize(
    ("uri", "is_told"),
    [
        ("sftp://me:pass@host/x", True),
        ("sftp://me@corp.com:pass@host/x", True),
        ("sftp://me@host:22/x", False),
        ("sftp://me:${env:WORD}@host/x", False),
    ],
)
def test_a_password_in_the_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, *, is_told: bool
) -> None:
    """Also behind a user's name with an @ inside."""
    monkeypatch.setenv("WORD", "word")
    job = tmp_path / "job.toml"
    job.write_text(f"[snapshots]\nuri = '{uri}'\n", "utf-8")
    assert is_told == (codes.SECRET_IN_FILE in {each.code for each in load_job(job).diagnostics})
