"""A job is submitted, and what Slurm says of it afterwards is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.clusters.slurm.test_commands import put

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")
JOB = """\
[job]
name = "small"
[model]
entry = "torch.nn:Linear"
args = { in_features = 4, out_features = 2 }
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
[dataset]
entry = "torch.utils.data:TensorDataset"
global_batch_size = 8
samples = 64
[train]
epochs = 1
[slurm]
time = "30 min"
output = "logs/%x/%j.out"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project from which jobs are submitted to a Slurm whose sbatch takes everything."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "job.toml").write_text(JOB)
    put(tmp_path, "sbatch", "cat > /dev/null; echo 4711")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_job_that_cannot_start_is_told_at_its_key(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm names the reason a moment later: until then it is asked again. The job stays queued, and the code is 0."""
    put(
        project,
        "squeue",
        f'echo x >> {project}/asked; [ $(wc -l < {project}/asked) -gt 1 ] && echo "PENDING (PartitionTimeLimit)" || echo "PENDING (None)"',
    )
    assert 0 == call(["submit", "slurm", "job.toml"])
    shown = capsys.readouterr()
    assert "Slurm job 4711 is queued" in shown.out
    assert "Slurm job 4711 stays queued and does not start: PartitionTimeLimit" in shown.err
    assert "job.toml:16:8" in shown.err
    assert "scancel 4711" in shown.err
    assert (project / "logs" / "small").is_dir()


@pytest.mark.usefixtures("project")
def test_a_place_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is a file, a disk that is full, no permission."""
    assert call(["submit", "slurm", "job.toml", "-o", "job.toml/x.sh"]) == 2
    assert capsys.readouterr().err.startswith("error: job.toml/x.sh cannot be written: ")


@pytest.mark.parametrize("answer", ['echo "PENDING (Priority)"', 'echo "RUNNING n1"', "echo no >&2; exit 1"])
def test_job_that_waits_its_turn_is_submitted_without_a_word_more(
    project: Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    """Nor does a squeue that fails harm a job that is queued."""
    put(project, "squeue", answer)
    assert 0 == call(["submit", "slurm", "job.toml"])
    assert "" == capsys.readouterr().err
