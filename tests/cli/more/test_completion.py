"""What shells complete: commands, job files, runs, snapshots, codes, keys and values of `--set`."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.cli.completion_candidates import answer
from elasticflow.cli.main import call, group
from elasticflow.cli.more.completion import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pexpect

ROOT = Path(__file__).resolve().parents[3]
RUN = "20261120-104500-4f2a"
SNAPSHOT = "000000000500-0001-0123abcd"
BREAKS = " \t\n\"'@><=;|&(:"  # what bash has as COMP_WORDBREAKS


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with jobs, a run and a snapshot, as the working folder."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "jobs" / "deep").mkdir(parents=True)
    (tmp_path / "jobs" / "mnist.toml").write_text("[optimizer]\nargs = { lr = 1e-3 }\n")
    (tmp_path / "jobs" / "my job.toml").touch()
    sweep = 'extends = "../mnist.toml"\n[matrix.axes]\njob.seed = [1, 2]\n[matrix.cases.wide]\n'
    (tmp_path / "jobs" / "deep" / "sweep.toml").write_text(sweep)
    (tmp_path / "model.py").touch()
    snapshots = tmp_path / "runs" / "mnist" / RUN / "snapshots"
    (snapshots / SNAPSHOT).mkdir(parents=True)
    (snapshots / SNAPSHOT / "MANIFEST.json").touch()
    (snapshots / "000000000900-0001-89abcdef").mkdir()  # not committed
    (tmp_path / "runs" / "mnist" / RUN / "state.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(*words: str) -> list[str]:
    """Return the candidates for the last of *words*, as zsh and fish get them."""
    return [line.partition("\t")[0] for line in answer("fish", words, group).splitlines()]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sn"], ["snapshots"]),
        (["snapshots", "pr"], ["prune"]),
        (["--ver"], ["--version"]),
        (["validate", "--str"], ["--strict"]),
        (["validate", ""], ["jobs/mnist.toml", "jobs/my job.toml", "jobs/", "runs/"]),
        (["validate", "jobs/m"], ["jobs/mnist.toml", "jobs/my job.toml"]),
        (["validate", "jobs/mnist.toml", "jobs/m"], ["jobs/my job.toml"]),
        (["run", "./j"], ["./jobs/"]),
        (["run", "n"], []),
        (["status", ""], ["mnist", RUN]),
        (["logs", "m"], ["mnist"]),
        (["resume", "2"], [RUN]),
        (["why", "runs/"], ["runs/mnist/"]),
        (["runs", ""], ["mnist"]),
        (["run", "jobs/mnist.toml", "--run-id", ""], [RUN]),
        (["snapshots", "show", ""], ["latest", "best", SNAPSHOT, "step:500", "mnist", RUN]),
        (["snapshots", "show", "mnist", "s"], ["step:500"]),
        (["snapshots", "verify", "latest", "l"], []),
        (["snapshots", "show", "nobody", ""], ["latest", "best"]),
        (["guide", "EF10"], ["EF101", "EF102", "EF103", "EF104", "EF105", "EF106", "EF107", "EF108", "EF109"]),
        (["run", "a.toml", "--set", "tr"], ["train."]),
        (["run", "a.toml", "--set", "train.prec"], ["train.precision="]),
        (["run", "a.toml", "--set=train.prec"], ["--set=train.precision="]),
        (["run", "a.toml", "--set", "snapshots.keep.l"], ["snapshots.keep.last="]),
        (["run", "a.toml", "--set", "train.compile="], ["train.compile=true", "train.compile=false"]),
        (["run", "a.toml", "--set", "train.precision=b"], ["train.precision=bf16"]),
        (["run", "a.toml", "--set", "snapshots.every=5"], ["snapshots.every=500 steps"]),
        (["run", "a.toml", "--set", "nodes.nproc_per_node="], [f"nodes.nproc_per_node={each}" for each in ("auto", "gpu", "8", "cpu")]),
        (["run", "a.toml", "--set", "optimizer.args."], []),
        (["run", "jobs/mnist.toml", "--set", "optimizer.args."], ["optimizer.args.lr="]),
        (["run", "a.toml", "--set", "nothing="], []),
        (["run", "jobs/deep/sweep.toml", "--case", ""], ["seed1", "seed2", "wide"]),
        (["run", "jobs/mnist.toml", "--case", ""], []),
        (["plan", "jobs/nowhere.toml", "--case", ""], []),
        (["plan", "jobs/mnist.toml", "--diff", "m"], ["mnist"]),
        (["diff", "mnist", "jobs/m"], ["jobs/mnist.toml", "jobs/my job.toml"]),
        (["init", ""], ["jobs/", "model.py", "runs/"]),
        (["init", "--example", "g"], ["gpt", "graphs"]),
        (["logs", "--level", "w"], ["warning"]),
        (["plan", "a.toml", "-o", "jo"], ["jobs/"]),
        (["guide", "--schema", "job", "-o", "no"], ["notes.txt"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nonsense", ""], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) < 4 else "",
)  # fmt: skip
def test_words_are_completed(words: list[str], expected: list[str]) -> None:
    """Each place of the command line offers what can stand there, and nothing else."""
    assert expected == offered(*words)


def test_snapshots_are_found_where_the_newest_launch_put_them(project: Path) -> None:
    """A job with snapshots at a path of its own; one on a network offers no names and asks nobody."""
    launch = project / "runs" / "mnist" / RUN / "launches" / "0001"
    launch.mkdir(parents=True)
    place = project / "elsewhere" / RUN / "snapshots" / "000000000700-0001-0123abcd"
    place.mkdir(parents=True)
    (place / "MANIFEST.json").touch()
    for uri, expected in (
        (str(project / "elsewhere"), ["step:700"]),
        ("elsewhere", ["step:700"]),
        ("s3://bucket/mnist", []),
    ):
        (launch / "job.json").write_text(json.dumps({"job": {"snapshots": {"uri": uri}}}))
        assert expected == offered("snapshots", "show", "mnist", "step:")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("elasticflow val", "validate"),
        ("validate jobs/my", r"jobs/my\ job.toml"),
        ("validate 'jobs/my", "jobs/my job.toml"),
        ("run a.toml --set train.precision=b", "bf16"),  # bash replaces what follows the =
        ("run a.toml --set=train.precision=b", "bf16"),
        (r"run a.toml --set snapshots.every=500\ st", r"500\ steps"),
        ('run a.toml --set "snapshots.every=5', "snapshots.every=500 steps"),
        ("snapshots show mnist step:", "500"),
        ("validate ~/nothing-of-this-name", ""),
    ],
)
def test_bash_replaces_only_what_follows_its_word_break(line: str, expected: str) -> None:
    """The reply fits what bash takes for the word, quoted as it needs to be."""
    line = f" {line.removeprefix('elasticflow ')}"
    assert expected == answer("bash", [line, BREAKS], group).removesuffix("\n")


@settings(max_examples=30)
@given(
    st.lists(
        st.text(max_size=8) | st.sampled_from(["run", "snapshots", "show", "--set", "--", "=", "-"]),
        max_size=4,
    )
)
@pytest.mark.usefixtures("project")
def test_no_words_raise(words: list[str]) -> None:
    """Whatever was typed, the answer is lines, or nothing."""
    answer("zsh", words, group)
    answer("bash", [" ".join(words), BREAKS], group)
    assert answer("tcsh", words, group) == ""


def test_install_writes_the_script_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time changes nothing; what the startup file held stays."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    script = tmp_path / ".local" / "share" / "elasticflow" / "completion.bash"
    for _ in range(2):
        assert call(["completion", "bash", "--install"]) == 0
        expected = f'alias ll=\'ls -l\'\n[ -r "{script}" ] && source "{script}"\n'
        assert expected == (tmp_path / ".bashrc").read_text()
    assert SCRIPTS["bash"].lstrip() == script.read_text()
    assert call(["completion", "fish", "--install"]) == 0
    assert "complete -c elasticflow" in (tmp_path / ".config/fish/completions/elasticflow.fish").read_text()


def test_a_full_disk_leaves_the_startup_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines may be in any encoding, and are not written again."""
    for name in ("XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    startup, own = tmp_path / ".bashrc", b"# caf\xe9\n" * 1000
    startup.write_bytes(own)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(own), limits[1]))
    try:
        assert call(["completion", "bash", "--install"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert startup.read_bytes() == own
    assert call(["completion", "bash", "--install"]) == 0
    assert startup.read_bytes().startswith(own)


LINES = {
    "elasticflow val": "elasticflow validate ",
    "elasticflow validate jobs/mn": "elasticflow validate jobs/mnist.toml ",
    "elasticflow validate jobs/my": r"elasticflow validate jobs/my\ job.toml ",
    "elasticflow run jobs/mnist.toml --set train.prec": "elasticflow run jobs/mnist.toml --set train.precision=",
    "elasticflow run jobs/mnist.toml --set train.precision=b": "elasticflow run jobs/mnist.toml --set train.precision=bf16 ",
    "elasticflow status 2": f"elasticflow status {RUN} ",
    "elasticflow snapshots show mnist step:": "elasticflow snapshots show mnist step:500 ",
    "elasticflow guide EF10": "elasticflow guide EF10",
    "elasticflow nonsense x": "elasticflow nonsense x",
}
START = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
}
SETTINGS = {
    "bash": "PS1='ready> '; bind 'set bell-style none' 'set enable-bracketed-paste off'; source <({} completion bash)",
    "zsh": "PS1='ready> '; setopt no_beep no_always_last_prompt; unset zle_bracketed_paste; source <({} completion zsh)",
}


@pytest.fixture
def elasticflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a program `elasticflow`: this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "elasticflow"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m elasticflow "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture
def shell(request: pytest.FixtureRequest, project: Path, elasticflow: Path) -> Iterator[pexpect.spawn[str]]:
    """Open an interactive shell in the project that has read its script."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    import pexpect

    environment = {**os.environ, "PATH": f"{elasticflow}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb"}
    child = pexpect.spawn(
        name, START[name], cwd=project, env=environment | {"HOME": str(project)}, encoding="utf-8", dimensions=(50, 200), timeout=100
    )  # fmt: skip
    child.sendline(f"{SETTINGS[name].format('elasticflow')}; echo o''k")
    child.expect_exact("ok\r\n")
    yield child
    child.close(force=True)


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["bash", "zsh"], indirect=True)
def test_tab_completes_the_line_in_an_interactive_shell(shell: pexpect.spawn[str]) -> None:
    """A real shell with a real line editor: each line becomes the expected one when Tab is pressed."""
    for typed, expected in LINES.items():
        shell.expect_exact("ready> ")
        shell.send(f"{typed}\t%")  # the sign is shown when the answer has come
        shell.expect_exact("%")
        line = str(shell.before).rpartition("\r\n")[2].replace("\x07", "")
        while "\x08" in line:  # zsh rubs out what it shows while it may still be taken back
            at = line.index("\x08")
            line = line[: at - 1] + line[at + 1 :]
        assert expected.rstrip() == line.rstrip().removeprefix("ready> "), typed
        shell.send("\x03")


@pytest.mark.integration
def test_fish_offers_candidates_with_what_they_are(project: Path, elasticflow: Path) -> None:
    """What `complete -C` says is what fish shows."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    environment = {
        **os.environ,
        "PATH": f"{elasticflow}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(project),
    }
    asked = "".join(f"echo '== {line}'; complete -C '{line}'\n" for line in LINES)
    program = f"elasticflow completion fish | source\n{asked}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], cwd=project, env=environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    answers = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert (
        "validate\tCheck job files; nothing is run and torch is not needed.\n" == answers["elasticflow val"]
    )
    assert answers["elasticflow validate jobs/mn"] == "jobs/mnist.toml\n"
    assert "train.precision=bf16\n" in answers["elasticflow run jobs/mnist.toml --set train.precision=b"]
    assert f"{RUN}\trun of mnist\n" == answers["elasticflow status 2"]
    assert answers["elasticflow nonsense x"] == ""
    assert done.stderr == ""


@pytest.mark.usefixtures("real_processes", "project")
def test_completion_loads_nothing_that_reads_a_job() -> None:
    """The slowest places: neither pydantic nor what stores, logs and training need."""
    sweep = ["run", "jobs/deep/sweep.toml", "--case", ""]
    for words in (["run", "a.toml", "--set", "train."], ["snapshots", "show", ""], ["guide", "E"], sweep):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "elasticflow", *words],
            env={**os.environ, "_ELASTICFLOW_COMPLETE": "zsh", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) >= 3
        assert loaded.isdisjoint({"pydantic", "torch", "numpy", "fsspec", "structlog", "rich"})
