"""kubectl as another program: what it is given, and what becomes of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.cli.small_job import JOB, PIECES

if TYPE_CHECKING:
    from pathlib import Path

KUBERNETES = '[kubernetes]\nimage = "registry.example.org/small:1"\n'
KUBECTL = '#!/bin/sh\necho "$@" > words\n/bin/cat > given.yaml\necho "job.batch/small created"\n'
REFUSES = "#!/bin/sh\n/bin/cat > /dev/null\necho 'error: no such namespace' >&2\nexit 1\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project, the working folder, whose `bin` is the only place for programs."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "job.toml").write_text(f'{JOB}{KUBERNETES}[snapshots]\nuri = "s3://bucket/small"\n')
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def _kubectl(project: Path, text: str) -> None:
    program = project / "bin" / "kubectl"
    program.write_text(text)
    program.chmod(0o755)


@pytest.mark.usefixtures("real_processes")
def test_a_job_is_applied(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest that --print shows is applied; with --print or -o kubectl is not called."""
    _kubectl(project, KUBECTL)
    assert call(["submit", "kubernetes", "job.toml", "--print"]) == 0
    manifest = capsys.readouterr().out
    assert call(["submit", "kubernetes", "job.toml", "-o", "job.yaml"]) == 0
    assert capsys.readouterr().out == "wrote job.yaml: kubectl apply -f job.yaml\n"
    assert not (project / "words").exists()

    assert call(["submit", "kubernetes", "job.toml"]) == 0

    assert capsys.readouterr().out == "job.batch/small created\n"
    assert (project / "words").read_text() == "apply -f -\n"
    assert manifest == (project / "given.yaml").read_text() == (project / "job.yaml").read_text()


@pytest.mark.usefixtures("real_processes")
def test_without_kubectl_or_against_its_will(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the words of kubectl, and how to come by the manifest."""
    assert call(["submit", "kubernetes", "job.toml"]) == 2
    told = capsys.readouterr().err
    assert "error: the job was not submitted: kubectl is not on this machine" in told
    assert "submit kubernetes JOB -o FILE" in told
    _kubectl(project, REFUSES)
    assert call(["submit", "kubernetes", "job.toml"]) == 2
    told = capsys.readouterr().err
    assert "error: kubectl has refused the job: error: no such namespace" in told
    assert "--print" in told


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    "refusal",
    [
        'Job in version "v1" cannot be handled as a Job: unknown field "spec.template.spec.tolerations[0].tolerationSecond"',
        'ValidationError(Job.spec.template.spec.tolerations[0]): unknown field "tolerationSecond" in io.k8s.api.core.v1.Toleration',
    ],
)
def test_a_field_that_kubernetes_does_not_know_is_shown_in_the_patch(
    project: Path, capsys: pytest.CaptureFixture[str], refusal: str
) -> None:
    """In the words of API servers and of older kubectls. `validate` names the command that asks the server."""
    (project / "site.yaml").write_text(
        "kind: Job\nspec:\n  template:\n    spec:\n      tolerations:\n"
        "      - {key: gpu, tolerationSecond: 5}\n"
    )
    job = project / "job.toml"
    job.write_text(job.read_text().replace(KUBERNETES, f'{KUBERNETES}patch = "site.yaml"\n'))
    _kubectl(project, f"#!/bin/sh\n/bin/cat > /dev/null\necho '{refusal}' >&2\nexit 1\n")
    assert call(["submit", "kubernetes", "job.toml"]) == 2
    told = capsys.readouterr().err
    assert "unknown field" in told
    assert f"correct kubernetes.patch at {project}/site.yaml:6" in told
    _kubectl(project, REFUSES)
    assert call(["submit", "kubernetes", "job.toml"]) == 2
    assert "--print" in capsys.readouterr().err

    assert call(["validate", "job.toml"]) == 0
    command = "elasticflow submit kubernetes job.toml --print | kubectl apply --dry-run=server -f -"
    assert f"kubernetes.patch is not read here; this checks it: {command}" in capsys.readouterr().out
