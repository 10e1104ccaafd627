"""Batch scripts: the same text as before, without findings of shellcheck. Run as a program: makes the files again."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from elasticflow import guide
from elasticflow.clusters.slurm.render import render_slurm, slurm_time
from elasticflow.errors import RenderError
from elasticflow.jobfile.load import require_job

HERE = Path(__file__).parent
GOLDEN, JOBS = HERE / "golden", HERE / "project" / "jobs"
CASES = {"gang": None, "one": None, "full": None, "array": None, "etcd": None, "sweep": "lr0.01"}
PROGRAM = "/opt/venv/bin/elasticflow"


def rendered(job: str, *overrides: str, run_id: str | None = None, program: str | None = PROGRAM) -> str:
    """Return the script of a job of the test's project, which is said to lie in /home/me."""
    loaded = require_job(JOBS / f"{job}.toml", overrides, case=CASES[job], environment=None)
    text = render_slurm(loaded, overrides, run_id, program=program)
    return text.replace(str(HERE / "project"), "/home/me/project")


@pytest.mark.parametrize("job", CASES)
def test_script_is_as_it_was(job: str) -> None:
    """Each change of the text is looked at: `python -m tests.clusters.slurm.test_render`."""
    assert (GOLDEN / f"{job}.sbatch").read_text("utf-8") == rendered(job)


@pytest.mark.parametrize("job", CASES)
@pytest.mark.usefixtures("real_processes")
def test_shellcheck_finds_nothing(job: str, tmp_path: Path) -> None:
    """Nor does bash itself, which reads the script without running it."""
    (script := tmp_path / "job.sbatch").write_text(rendered(job))
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    # What the job's own lines read is not here.
    found = subprocess.run(
        ["shellcheck", "--exclude=SC1090", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "" == found.stdout


def test_words_of_the_command_line_go_on_to_the_nodes() -> None:
    """Quoted as a shell needs it; what only the script is made of does not."""
    text = rendered("gang", "optimizer.args.lr=0.5", "env.NOTE=it's", "slurm.time=1 h")
    assert "--set optimizer.args.lr=0.5 --set 'env.NOTE=it'\"'\"'s' --run-id" in text
    assert "slurm.time" not in text.partition("srun ")[2]
    assert "#SBATCH --time=0-01:00:00" in text


def test_nodes_know_the_command_that_goes_on() -> None:
    """It submits again, with every value of the command line; a shell of its own reads what is told."""
    script = rendered("gang", "env.NOTE=it's", "slurm.time=1 h")
    [line] = [each for each in script.splitlines() if each.startswith("export ELASTICFLOW_RESUME_COMMAND=")]
    words = shlex.split(line.removeprefix("export ELASTICFLOW_RESUME_COMMAND="))
    assert [
        "elasticflow submit slurm jobs/gang.toml --set 'env.NOTE=it'\"'\"'s' --set 'slurm.time=1 h' --run-id $run_id"
    ] == words


def test_run_is_called_after_the_slurm_job_or_as_it_is_given() -> None:
    """An array's parts share one run; a case ends the name."""
    assert "run_id=slurm-$SLURM_JOB_ID\n" in rendered("gang")
    assert "run_id=slurm-$SLURM_ARRAY_JOB_ID\n" in rendered("array")
    assert "run_id=slurm-$SLURM_JOB_ID-lr0.01\n" in rendered("sweep")
    assert "run_id=nightly\n" in rendered("gang", run_id="nightly")


@pytest.mark.parametrize("job", ["gang", "one", "array", "etcd"])
def test_nodes_have_the_scripts_variables_and_the_jobs_own_options(job: str) -> None:
    """At sites with SBATCH_EXPORT=NONE, too; an option is one word of the shell."""
    srun = 'slurm.srun=["--container-image=r#t:1", "--container-mounts=/a b:/b"]'
    text = rendered(job, srun)
    words = shlex.split(text[text.index("\nsrun ") :].partition("&\n")[0].replace("\\\n", " "))
    assert {"--export=ALL", "--container-image=r#t:1", "--container-mounts=/a b:/b"} <= set(words)
    assert "#SBATCH --container" not in text


@pytest.mark.usefixtures("real_processes")
def test_lines_of_a_node_begin_with_its_name_and_a_killed_command_is_started_again(tmp_path: Path) -> None:
    """The shell that each node runs, with programs that stand in for Slurm's and for elasticflow; its exit code is the command's."""
    told, runs = _node_alone(tmp_path, "n2", ["kill -9 $$", "echo trained"], "n[1-3]")
    assert ["n2 | trained"] == [line for line in told.splitlines() if "trained" in line]
    assert 2 == len(runs)
    assert all("--node-rank 1 --join head:7 --set nodes.endpoint=head:7" in run for run in runs)


@pytest.mark.usefixtures("real_processes")
def test_next_node_leads_once_slurm_has_lost_the_first(tmp_path: Path) -> None:
    """At its own address; the others take part there. With too few nodes the job is queued again."""
    _, runs = _node_alone(tmp_path / "next", "n2", ["exit 75", "exit 0"], "n[2-3]")
    assert (2, True) == (len(runs), "--node-rank 0 --join host-n2:7 --set" in runs[1])
    _, runs = _node_alone(tmp_path / "other", "n3", ["exit 75", "exit 0"], "n[2-3]")
    assert "--node-rank 1 --join host-n2:7" in runs[1]
    told, runs = _node_alone(tmp_path / "few", "n3", ["exit 75"], "n3")
    assert (1, True) == (len(runs), "requeue 7" in told)


@pytest.mark.usefixtures("real_processes")
def test_last_node_without_the_first_ends_the_job(tmp_path: Path) -> None:
    """It was refused, or gave up: nodes that train on must not be ended, and the last one must not leave the job idle."""
    told, _ = _node_alone(tmp_path, "n2", ["exit 1"], "n[2-3]")
    assert "scancel" not in told
    told, _ = _node_alone(tmp_path, "n3", ["exit 1", "exit 1"], "n[2-3]")
    assert "scancel 7" in told


@pytest.mark.usefixtures("real_processes")
def test_node_goes_on_without_a_reader_of_its_lines(tmp_path: Path) -> None:
    """As when srun is lost with the first node: the command's many lines go nowhere, and its exit code counts."""
    many = "for line in $(seq 2000); do echo $line || exit 1; done; exit 0"
    _, runs = _node_alone(
        tmp_path, "n2", [many, "exit 9"], "n[1-3]", reads="exec > >(exec true); sleep 0.3; "
    )
    assert 1 == len(runs)
    assert "0" == (tmp_path / "code").read_text().strip()


def _node_alone(
    folder: Path, name: str, ends: list[str], nodes: str, reads: str = ""
) -> tuple[str, list[str]]:
    """Run the shell of the node *name* of the rendered gang; return its lines, and the arguments of each start.

    Args:
        ends: What the command does at each start, in shell.
        nodes: Nodes of the job that squeue lists.
        reads: Lines of shell before the shell's own, such as ones that close its output.
    """
    folder.mkdir(exist_ok=True)
    script = rendered("gang")
    shell = (
        script[script.index("node='") + 6 : script.index('exit "$code"\'')]
        + f'echo "$code" > {folder}/code; exit "$code"'
    )
    shell = reads + shell
    cases = "\n".join(f"{number}) {end} ;;" for number, end in enumerate(ends, 1))
    programs = {
        "elasticflow": f'echo "$@" >> {folder}/runs\n[ "$1" = run ] || exit 75\ncase $(grep -c "^run" {folder}/runs) in\n{cases}\nesac',
        "squeue": f'echo "{nodes}"',
        "scontrol": 'case "$2" in\nhostnames) case "$3" in "n[1-3]") printf "n1\\nn2\\nn3\\n" ;; "n[2-3]") printf "n2\\nn3\\n" ;; *) echo "$3" ;; esac ;;'
        '\nnode) echo "   NodeAddr=a NodeHostName=host-$3 Version=22" ;;\n*) echo "$@" ;;\nesac',
        "scancel": 'echo "scancel $@"',
    }
    for program, text in programs.items():
        (folder / program).write_text(f"#!/bin/bash\n{text}\n")
        (folder / program).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", shell, "elasticflow", "run", "jobs/gang.toml"],
        env={
            "PATH": f"{folder}:/usr/bin:/bin", "SLURMD_NODENAME": name, "first": "n1", "folder": str(folder),
            "head": "head:7", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7",
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    runs = [line for line in (folder / "runs").read_text().splitlines() if line.startswith("run ")]
    return done.stdout + done.stderr, runs


def _blocks(form: str) -> list[str]:
    """Return the blocks of the guide's section about modules and containers in a form such as `toml`."""
    page = (Path(guide.__file__).parent / "slurm.md").read_text()
    section = page.partition("## Modules and containers")[2].partition("\n## ")[0]
    return re.findall(rf"```{form}\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize("block", _blocks("toml"))
@pytest.mark.usefixtures("real_processes")
def test_lines_of_the_guide_for_modules_and_containers_make_a_script(block: str, tmp_path: Path) -> None:
    """They are taken, and each stands in a script that bash reads."""
    overrides = [f"slurm.{key}={json.dumps(value)}" for key, value in tomllib.loads(block)["slurm"].items()]
    text = rendered("gang", *overrides, program=None)
    for lines in tomllib.loads(block)["slurm"].values():
        assert all(line in text for line in lines)
    (script := tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)


@pytest.mark.usefixtures("real_processes")
def test_command_of_the_guide_for_apptainer_passes_on_arguments_and_exit_code(tmp_path: Path) -> None:
    """With a program that stands in for apptainer, and runs what is said to be in the image."""
    (wrapper,) = _blocks("bash")
    (tmp_path / "bin").mkdir()
    programs = {
        "bin/elasticflow": wrapper,
        "apptainer": '#!/bin/bash\necho "$@" > apptainer.words\nwhile [ "$1" != image.sif ]; do shift; done\nshift\nexec "inside/$1" "${@:2}"\n',
        "inside/elasticflow": '#!/bin/bash\necho "$2"\nexit 75\n',
    }
    (tmp_path / "inside").mkdir()
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["elasticflow", "run", "jobs/a b.toml"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (75, "jobs/a b.toml\n") == (done.returncode, done.stdout)
    assert f"--bind {tmp_path}" in (tmp_path / "apptainer.words").read_text()


def test_setup_lines_decide_which_elasticflow_is_called() -> None:
    """With lines that make a PATH: what is found there; without: the one that rendered the script."""
    assert "\nelasticflow=elasticflow\nmodule load" in rendered("full", program=None)
    assert re.search(r"\nelasticflow=/\S+/bin/elasticflow\n", rendered("gang", program=None))


def test_a_job_that_does_not_speak_of_slurm_is_refused() -> None:
    """With what to write."""
    loaded = require_job(JOBS / "base.toml", (), environment=None)
    with pytest.raises(RenderError, match=r"no \[slurm\]") as refused:
        render_slurm(loaded)
    assert "--set slurm.time=" in (refused.value.remedy or "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60, "0-00:01:00"), (61, "0-00:02:00"), (5400, "0-01:30:00"), (129_600, "1-12:00:00")],
)
def test_times_are_in_whole_minutes(seconds: float, text: str) -> None:
    """Slurm counts no seconds: rounded up."""
    assert text == slurm_time(seconds)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.sbatch").write_text(rendered(name), "utf-8")
