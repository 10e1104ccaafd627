"""`elasticflow validate`, `guide`, `completion` and the group they hang on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import COMMANDS, call
from elasticflow.jobfile.diagnostics.render_text import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
GALLERY = ROOT / "tests" / "jobfile" / "gallery"
Ran = tuple[int, str, str]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Return a function that runs the command line in the gallery and returns code, output and errors."""
    monkeypatch.chdir(GALLERY)
    monkeypatch.delenv("ELASTICFLOW_OUTPUT_FORMAT", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: str) -> Ran:
        code = call(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_good_file_is_told_so(ran: Callable[..., Ran]) -> None:
    """Exit code 0 and one line."""
    code, out, err = ran("validate", "jobs/good_base.toml")
    assert (code, err) == (0, "")
    assert out.startswith("1 file checked: no problems")


def test_all_problems_of_all_files_are_shown_at_once(ran: Callable[..., Ran]) -> None:
    """Exit code 1 after the last file, a count at the end."""
    code, out, _ = ran(
        "validate", "jobs/value_zero.toml", "jobs/good_base.toml", "jobs/key_unknown_near.toml"
    )
    assert code == 1
    assert "jobs/value_zero.toml:17:10" in out
    assert "jobs/key_unknown_near.toml:17:1" in out
    assert "3 files checked: 2 errors" in out


def test_a_script_hides_no_finding_of_deep_about_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is refused, with [matrix] or without: it would train."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    script = '[job]\nname = "s"\n[script]\nentry = "train.py"\n'
    Path("one.toml").write_text(script)
    Path("two.toml").write_text(f"{script}[matrix.axes]\njob.seed = [1, 2]\n")
    Path("wrong.toml").write_text('[job]\nname = "-"\n')
    for alone in ("one.toml", "two.toml"):
        assert call(["validate", "--deep", alone]) == 2
        assert "error: --deep tries out what a job file names" in capsys.readouterr().err
    assert call(["validate", "--deep", "one.toml", "two.toml", "wrong.toml"]) == 1
    out = capsys.readouterr().out
    assert "error[EF105]" in out
    for named in ("one.toml", "two.toml"):
        assert f"{named}: not tried out: its script would train" in out
    assert "wrong.toml: not tried out: it has errors" in out


def test_a_missing_file_is_a_finding(ran: Callable[..., Ran]) -> None:
    """A mistyped name is answered like any other mistake, exit code 1."""
    code, out, _ = ran("validate", "jobs/god_base.toml")
    assert code == 1
    assert out == (
        "error[EF001]: no such file: jobs/god_base.toml\n"
        "--> jobs/god_base.toml\n"
        ' = help: did you mean "jobs/good_base.toml"?\n'
        "\n"
        "1 file checked: 1 error\n"
        "`elasticflow guide EF001` says more, with an example\n"
    )


def test_warnings_fail_only_when_asked(ran: Callable[..., Ran]) -> None:
    """`--strict` makes a warning count."""
    assert ran("validate", "jobs/warn_no_endpoint.toml")[0] == 0
    assert ran("validate", "--strict", "jobs/warn_no_endpoint.toml")[0] == 1


def test_patterns_are_told_what_to_do(ran: Callable[..., Ran]) -> None:
    """A pattern that matched nothing is no file name."""
    code, out, _ = ran("validate", "--format", "concise", "jobs/z*.toml")
    assert code == 1
    assert out.splitlines() == [
        "jobs/z*.toml: error[EF001] no such file: jobs/z*.toml (no file matches the pattern, so the shell passed it on as it stands)",
        "1 file checked: 1 error",
    ]


def test_a_folder_stands_for_its_job_files(
    ran: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `jobs` and *.job.toml at any depth, never a run's copies; without a word the whole project's."""
    good = '[job]\nname = "{}"\n[model]\nentry = "torch.nn:Linear"\n'
    for name in (
        "jobs/a.toml",
        "team/jobs/b.toml",
        "team/c.job.toml",
        "team/ruff.toml",
        "runs/x/jobs/d.toml",
        ".venv/jobs/e.toml",
        "configs/f.toml",
        "empty/none.txt",
        "pyproject.toml",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(good.format(path.stem))
    monkeypatch.chdir(tmp_path)

    def checked(*words: str) -> set[str]:
        _, out, _ = ran("validate", "--format", "concise", *words)
        return {line.partition(":")[0] for line in out.splitlines() if ".toml:" in line}

    assert checked() == checked(".") == {"jobs/a.toml", "team/jobs/b.toml", "team/c.job.toml"}
    assert checked("jobs") == {"jobs/a.toml"}
    assert checked("configs", "jobs") == {"configs/f.toml", "jobs/a.toml"}
    code, _, err = ran("validate", "empty")
    assert code == 2
    assert "there is no job file in empty: give one" in err


def test_a_job_can_be_called_by_its_name(
    ran: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its file, or of its job if that is one file's alone; a file of that name comes first."""
    job = '[job]\nname = "{}"\n[model]\nentry = "torch.nn:Linear"\n'
    for name, called in (("jobs/a.toml", "first"), ("jobs/b.toml", "twice"), ("deep/c.job.toml", "twice")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(job.format(called))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for word, place in (("a", "jobs/a.toml"), ("first", "jobs/a.toml"), ("c", "deep/c.job.toml")):
        assert ran("validate", "--format", "concise", word)[1].startswith(f"{place}:")
    for word in ("twice", "absent"):
        assert ran("validate", "--format", "concise", word)[1].startswith(f"{word}: error[EF001]")
    Path("a").write_text("x = 1\n")
    assert ran("validate", "--format", "concise", "a")[1].startswith("a:")


def test_a_file_named_twice_is_checked_once(ran: Callable[..., Ran]) -> None:
    """However it is spelled; findings of all files are sorted."""
    again = str(GALLERY / "jobs" / "value_zero.toml")
    _, out, _ = ran(
        "validate", "jobs/value_zero.toml", "./jobs/value_zero.toml", again, "jobs/argument_type.toml"
    )
    assert "2 files checked: 2 errors" in out
    assert out.index("argument_type") < out.index("value_zero")


def test_names_that_are_no_text_can_be_printed(ran: Callable[..., Ran]) -> None:
    """A file name of stray bytes is a finding in every format."""
    for style in FORMATS:
        code, out, _ = ran("validate", "--format", style, "jobs/\udcff.toml")
        assert (code, "EF001" in out) == (1, True)


def test_notes_are_for_machines_that_collect_them(ran: Callable[..., Ran], tmp_path: Path) -> None:
    """What cannot be told is in JSON and SARIF; people and pull requests are spared."""
    job = tmp_path / "job.toml"
    text = (GALLERY / "jobs" / "good_base.toml").read_text().replace("shop:Net", "no_such_package:Net")
    job.write_text(text)
    assert "EF215" in ran("validate", "--format", "json", str(job))[1]
    assert ran("validate", "--format", "github", str(job))[1] == ""
    assert "not looked at" in ran("validate", str(job))[1]


def test_flags_change_keys_of_every_file(ran: Callable[..., Ran]) -> None:
    """`--set` is checked like the file."""
    code, out, _ = ran("validate", "jobs/good_base.toml", "--set", "train.epochs=0")
    assert code == 1
    assert "train.epochs must be at least 1, not 0\n --> --set:1:14" in out


def test_output_format_comes_from_the_option_or_the_environment(
    ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option wins over ELASTICFLOW_OUTPUT_FORMAT."""
    monkeypatch.setenv("ELASTICFLOW_OUTPUT_FORMAT", "json")
    _, out, _ = ran("validate", "jobs/value_zero.toml")
    assert "EF104" in [each["code"] for each in json.loads(out)]
    _, out, _ = ran("validate", "--format", "github", "jobs/value_zero.toml")
    assert out.splitlines()[-1].startswith(
        "::error title=elasticflow (EF104),file=jobs/value_zero.toml,line=17"
    )
    _, out, _ = ran("validate", "--format", "sarif", "jobs/value_zero.toml")
    assert json.loads(out)["version"] == "2.1.0"
    _, out, _ = ran("validate", "--format", "concise", "jobs/value_zero.toml")
    assert (
        out.splitlines()[0]
        == "jobs/value_zero.toml:17:10: error[EF104] train.epochs must be at least 1, not 0"
    )


def test_colours_are_for_those_who_ask(ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into a pipe; FORCE_COLOR asks for them and NO_COLOR has the last word."""
    assert "\x1b[" not in ran("validate", "jobs/value_zero.toml")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31merror" in ran("validate", "jobs/value_zero.toml")[1]
    monkeypatch.setenv("FORCE_COLOR", "0")
    assert "\x1b[" not in ran("validate", "jobs/value_zero.toml")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in ran("validate", "jobs/value_zero.toml")[1]


def test_usage_errors_are_exit_code_2_with_a_suggestion(ran: Callable[..., Ran]) -> None:
    """Mistyped commands and options are answered with the nearest."""
    code, _, err = ran("valdate")
    assert (code, err.splitlines()[-1]) == (2, "error: No such command 'valdate'. Did you mean 'validate'?")
    code, _, err = ran("validate", "--strickt", "x")
    assert (code, err.splitlines()[-1]) == (2, "error: No such option '--strickt'. Did you mean '--strict'?")
    assert ran("plan")[0] == 2
    for command in ("validate", "plan"):
        code, _, err = ran(command, "jobs/good_base.toml", "--deep-timeout", "9")
        assert (code, err.splitlines()[-1]) == (2, "error: --deep-timeout limits --deep, which is not given")
    code, _, err = ran("submit", "jobs/small.toml", "--print")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: jobs/small.toml comes after a command: slurm, kubernetes",
    )


def test_help_names_every_command_without_importing_one(ran: Callable[..., Ran]) -> None:
    """The list comes from a table."""
    code, out, _ = ran("--help")
    assert code == 0
    assert all(f"  {name} " in out and entry.line in out for name, entry in COMMANDS.items())


def test_explain_prints_a_bad_and_a_good_example(ran: Callable[..., Ran]) -> None:
    """Codes are explained in either case, listed, and suggested."""
    code, out, _ = ran("guide", "ef101")
    assert code == 0
    assert out.startswith("EF101: unknown key or table\n")
    assert "Bad:\n    [train]\n    epoch = 5\n\nGood:\n    [train]\n    epochs = 5\n" in out
    assert "EF003  the file is not valid TOML" in ran("guide", "codes")[1]
    code, _, err = ran("guide", "EF1")
    assert code == 2
    assert 'there is no code "EF1"' in err


def test_explain_tells_where_codes_are_listed_and_what_names_of_other_tools_mean(
    ran: Callable[..., Ran],
) -> None:
    """A name that no key has here is explained as well."""
    code, _, err = ran("guide", "EF999")
    assert code == 2
    assert 'there is no code "EF999"; `elasticflow guide codes` lists them' in err
    assert ran("guide", "max_grad_norm") == (
        0,
        "max_grad_norm is optimizer.clip_grad_norm in a job file\n",
        "",
    )
    assert ran("guide", "shuffle")[1].startswith("shuffle: leave it out: ")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--epochs", "3"), "write --set train.epochs=3"),
        (("--lr=1e-3",), "write --set optimizer.args.lr=0.001"),
        (("--max-epochs", "4"), "write --set train.epochs=4"),
        (("--train.epochs", "4"), "keys of the job file are set by --set train.epochs=4"),
        (("--max-restarts", "3"), "this is restarts.budget here"),  # no slip of [restarts]
        (("--nnodes=1:4",), "this is nodes.min and nodes.max here"),
        (("--every", "3"), "keys of the job file are set by --set: evaluation.every=... or"),
        (("--shuffle",), "leave it out: each epoch has an order of its own"),
    ],
)
def test_an_option_that_is_a_key_is_told_how_it_is_set(
    ran: Callable[..., Ran], words: tuple[str, ...], hint: str
) -> None:
    """By --set, with the value that was given; also by the names of other tools."""
    for command in ("run", "validate", "plan"):
        code, _, err = ran(command, "jobs/value_zero.toml", *words)
        assert code == 2
        assert err.splitlines()[-1].startswith(f"help: {hint}")
    assert "help:" not in ran("run", "jobs/value_zero.toml", "--no-such-thing")[2]
    assert "help:" not in ran("runs", "--epochs")[2]


def test_schema_is_printed_or_written(ran: Callable[..., Ran], tmp_path: Path) -> None:
    """The schema on standard output and in a file are the same."""
    code, out, _ = ran("guide", "--schema", "job")
    assert code == 0
    assert ran("guide", "--schema", "job", "-o", str(tmp_path / "schema.json"))[0] == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == json.loads(out)
    assert ran("guide", "--schema", "job", "-o", str(tmp_path / "schema.json" / "no"))[0] == 2


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python process in the repository."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    "command",
    [
        ("validate", "jobs/mnist.toml"),
        ("--help",),
        ("--version",),
        ("guide", "--schema", "job"),
        ("guide", "EF101"),
    ],
)
def test_light_commands_load_no_heavy_package(command: tuple[str, ...]) -> None:
    """torch, fsspec, structlog, rich and ruamel.yaml stay out of what must start at once."""
    done = process("-X", "importtime", "-m", "elasticflow", *command)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "fsspec", "structlog", "rich", "ruamel", "examples"})
    assert command[0] == "validate" or "pydantic" not in loaded


@pytest.mark.usefixtures("real_processes")
def test_the_main_job_has_no_errors() -> None:
    """The job of the README passes as it is."""
    done = process("-m", "elasticflow", "validate", "jobs/mnist.toml")
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("real_processes")
def test_a_closed_pipe_is_no_traceback() -> None:
    """`elasticflow guide --schema job | head -1` ends quietly."""
    line = f"{sys.executable} -m elasticflow guide --schema job | head -1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("{\n", "")
