"""sbatch and squeue as they answer, and as they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.clusters.slurm import commands
from elasticflow.errors import SlurmRefusedError, SubmitError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that is the PATH, beside the shell's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    """Make a program of shell lines."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_the_script_is_given_to_sbatch_which_says_the_number(program: Path) -> None:
    """On standard input; of several clusters the number alone counts."""
    put(program, "sbatch", f'cat > {program}/given; echo "4711;alpha"')
    assert 4711 == commands.submit("#!/bin/bash\n")
    assert "#!/bin/bash\n" == (program / "given").read_text()


def test_what_sbatch_refuses_is_said_in_its_own_words(program: Path) -> None:
    """And where to look."""
    put(
        program,
        "sbatch",
        'echo "sbatch: error: invalid partition specified: gpuu" >&2; echo "sbatch: error: it failed" >&2; exit 1',
    )
    with pytest.raises(
        SlurmRefusedError, match="submitted: invalid partition specified: gpuu; it failed"
    ) as refused:
        commands.submit("")
    assert "[slurm]" in (refused.value.remedy or "")


def test_texts_that_are_no_utf_8_go_through(program: Path) -> None:
    """The bytes of a folder's name reach sbatch as they are; words in another encoding are still a refusal."""
    put(program, "sbatch", f"cat > {program}/given; printf 'sbatch: error: Ung\\374ltig\\n' >&2; exit 1")
    with pytest.raises(SlurmRefusedError, match="submitted: Ung\ufffdltig"):
        commands.submit("#SBATCH --chdir=/n\udcfc\n")
    assert b"#SBATCH --chdir=/n\xfc\n" == (program / "given").read_bytes()


def test_a_machine_without_slurm_is_told_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sbatch on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="sbatch is not on this machine") as refused:
        commands.submit("")
    assert "login node" in (refused.value.remedy or "")


def test_leader_is_lost_once_its_job_has_it_no_more(program: Path) -> None:
    """By squeue's nodes of this job; where that is not known, or there is no squeue, nothing is said."""
    gang = {"SLURM_JOB_ID": "7", commands.LEADING_NODE: "n1"}
    put(program, "squeue", f'echo "$@" > {program}/asked; echo "n[2-3]"')
    put(program, "scontrol", '[ "$3" = "n[2-3]" ] && printf "n2\\nn3\\n"')
    assert "Slurm has taken n1, which led, from job 7" == commands.why_leader_is_lost(gang)
    assert "--jobs 7" in (program / "asked").read_text()
    assert commands.why_leader_is_lost({**gang, commands.LEADING_NODE: "n3"}) is None
    assert commands.why_leader_is_lost({"SLURM_JOB_ID": "7"}) is None
    put(program, "squeue", "exit 0")
    assert commands.why_leader_is_lost(gang) is None
    put(program, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert commands.why_leader_is_lost(gang) is None
    (program / "squeue").unlink()
    assert commands.why_leader_is_lost(gang) is None


def test_parts_of_a_job_are_told_apart(program: Path) -> None:
    """By state; a job that Slurm has forgotten is over."""
    put(program, "squeue", "echo 'PENDING (Resources)'; echo 'RUNNING n[1-2]'")
    assert [("PENDING", "Resources"), ("RUNNING", "n[1-2]")] == commands.queued(7)
    put(program, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert [] == commands.queued(7)
    put(program, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SubmitError, match="Unable to contact"):
        commands.queued(7)
