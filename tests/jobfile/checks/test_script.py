"""`[script]` in job files: what is refused, where, and what is said instead; what a launch is made of."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from elasticflow.compiler.launch_folder import launch_files, materialize, read_plan
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.job_json import job_digest, job_from_json, job_to_json
from elasticflow.compiler.provenance.origins import own_sources
from elasticflow.jobfile.load import load_job, require_job
from elasticflow.protocol.loop_settings import LoopSettings

SCRIPT = """
[job]
name = "own"
[script]
entry = "src/train.py"
args = ["--lr=0.1", "two words"]
preload = ["json"]
"""
WRONG = [
    (SCRIPT.replace("src/train.py", "train.py"), "EF201", 'there is no file "train.py"', "project root"),
    (SCRIPT.replace("src/train.py", "src"), "EF201", '"src" is a folder', "module ="),
    (SCRIPT.replace("src/train.py", "broken.py"), "EF208", "broken.py is not valid Python", "refuse"),
    (SCRIPT.replace('entry = "src/train.py"', 'module = "pkg"'), "EF201", "pkg.__main__", "python -m"),
    (
        SCRIPT.replace('entry = "src/train.py"', 'module = "pkg.tain"'),
        "EF201",
        "no module pkg.tain",
        "project root",
    ),
    (SCRIPT.replace("src/train.py", "deep.py"), "EF208", "deep.py is not valid Python here", "refuse it"),
    (SCRIPT.replace('entry = "src/train.py"', ""), "EF106", "[script] needs entry or module", "train.py"),
    (SCRIPT + 'module = "pkg.train"', "EF106", "exclude each other", "keep one"),
    (SCRIPT.replace("src/train.py", "-c"), "EF105", "begins with no -", None),
    (SCRIPT.replace('"--lr=0.1"', "1"), "EF103", "script.args", None),
    (
        SCRIPT + '[model]\nentry = "a:b"\nloss = "c:d"',
        "EF106",
        "[model] has no meaning beside [script]",
        "leave [model]",
    ),
    (
        SCRIPT + '[optimizer]\nentry = "a:b"',
        "EF106",
        "the script makes its own optimizer",
        "leave [optimizer]",
    ),
    (SCRIPT + "[train]\nepochs = 1", "EF106", "the script says how long it trains", "leave [train]"),
    (
        SCRIPT + '[snapshots]\ninclude = { a = "pkg:b" }',
        "EF106",
        "snapshots.include has no meaning",
        "elasticflow.join",
    ),
    (SCRIPT + '[restarts]\nwarm = "standby"', "EF106", "a standby does not know", "script.preload"),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with a script, a package and a file that is no Python."""
    (tmp_path / "pyproject.toml").write_text("")
    for name, text in {
        "src/train.py": "import helper\nprint('trained')\n",
        "src/helper.py": "",
        "broken.py": "x = (\n",
        "deep.py": f"x = {'1+' * 20_000}1\n",
        "pkg/__init__.py": "",
        "pkg/train.py": "from . import parts\n",
        "pkg/parts.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("text", "code", "message", "remedy"), WRONG)
def test_what_is_refused(project: Path, text: str, code: str, message: str, remedy: str | None) -> None:
    """With code, words and remedy."""
    (project / "job.toml").write_text(text)
    told = load_job(project / "job.toml").diagnostics
    found = [each for each in told if each.code == code and message in each.message]
    assert found, told
    assert remedy is None or remedy in (found[0].help or ""), found[0].help


def test_a_job_goes_to_json_and_back_with_the_tables_that_it_has(project: Path) -> None:
    """The record of a launch names no model, and another argument is another job."""
    (project / "job.toml").write_text(SCRIPT)
    job = require_job(project / "job.toml").job
    other = require_job(project / "job.toml", ['script.args=["--lr=0.2"]']).job
    assert job is not None
    assert other is not None

    assert {"script", "job", "nodes"} <= job_to_json(job).keys()
    assert not {"model", "optimizer", "dataset", "train", "ddp"} & job_to_json(job).keys()
    assert job_digest(job) == job_digest(job_from_json(job_to_json(job))) != job_digest(other)
    with pytest.raises(ValueError, match="has no meaning beside"):
        job_from_json({**job_to_json(job), "ddp": {}})


@pytest.mark.parametrize(
    ("program", "sources"),
    [
        ('entry = "src/train.py"', {"job.toml", "src/train.py", "src/helper.py"}),
        ('module = "pkg.train"', {"job.toml", "pkg/__init__.py", "pkg/train.py", "pkg/parts.py"}),
    ],
)
def test_a_launch_is_the_scripts_own_files(project: Path, program: str, sources: set[str]) -> None:
    """What it runs is told whole, its files are recorded, and the plan read back is the same; no train.py is written."""
    (project / "job.toml").write_text(SCRIPT.replace('entry = "src/train.py"', program))
    loaded = require_job(project / "job.toml")
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(
        project / "out", launch_files(plan, loaded.job, project / "out", project_root=loaded.project_root)
    )

    assert not (project / "out" / "train.py").exists()
    assert read_plan(project / "out") == plan
    assert sources == json.loads((project / "out" / "job.json").read_text())["sources"].keys()
    script = plan.script
    assert script is not None
    assert [*plan.torchrun_args][-2:] == ["--lr=0.1", "two words"]
    assert plan.modules == ("json",)


@pytest.mark.parametrize("program", ['module = "own.train"', 'entry = "src/train.py"'])
def test_the_folders_of_job_path_end_its_search_path(project: Path, program: str) -> None:
    """A module there is found, as the workers find it, and what the script imports from there is recorded."""
    (project / "lib" / "own").mkdir(parents=True)
    (project / "lib" / "own" / "train.py").write_text("import helper\n")
    (project / "lib" / "helper.py").write_text("")
    (project / "src" / "helper.py").unlink()
    text = SCRIPT.replace('entry = "src/train.py"', program).replace("[script]", 'path = ["lib"]\n[script]')
    (project / "job.toml").write_text(text)

    loaded = require_job(project / "job.toml")
    assert loaded.diagnostics == []
    assert "lib/helper.py" in own_sources(loaded.job, project, ["job.toml"])


@pytest.mark.usefixtures("real_processes")
def test_torchrun_sh_starts_the_script_in_the_project_with_its_arguments(project: Path) -> None:
    """By plain torchrun, from any folder: here Python is a shell that tells what it was called with."""
    (project / "job.toml").write_text(SCRIPT)
    loaded = require_job(project / "job.toml")
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(
        project / "out", launch_files(plan, loaded.job, project / "out", project_root=loaded.project_root)
    )
    told = project / "told.sh"
    told.write_text('#!/bin/sh\npwd\nfor each in "$@"; do echo "$each"; done\n')
    told.chmod(0o755)
    shown = subprocess.run(
        ["bash", str(project / "out" / "torchrun.sh"), "--nnodes=1"],
        cwd="/",
        env={"PYTHON": str(told), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.splitlines()

    assert shown[0] == str(project)
    assert shown[-5:] == ["--nnodes=1", "--", "src/train.py", "--lr=0.1", "two words"]


def test_what_the_job_file_says_to_a_loop_goes_through_a_variable(project: Path) -> None:
    """The same on the other side; a relative place of snapshots is this machine's folder."""
    (project / "job.toml").write_text(
        SCRIPT
        + '[snapshots]\nuri = "kept"\nevery = "5 steps"\nkeep = { last = 2 }\n[logging]\nevery = "10 steps"'
    )
    loaded = require_job(project / "job.toml")
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    settings = plan.loop_settings(Path("/elsewhere"))

    assert ("/elsewhere/kept", ("5 steps",), 2, 10) == (
        settings.snapshots.uri,
        settings.snapshots.every,
        settings.snapshots.keep.last,
        settings.log_every,
    )
    home = plan.model_copy(update={"snapshots": replace(plan.snapshots, uri="~/kept")})
    assert home.loop_settings(Path("/elsewhere")).snapshots.uri == "~/kept"  # the launcher expands it so, too
    assert settings == LoopSettings.from_json(settings.to_json())
    for text in ("{}", "[]", settings.to_json().replace('"seed":0', '"sed":0')):
        with pytest.raises(ValueError, match="not the settings"):
            LoopSettings.from_json(text)
