"""Every fenced block of the project's pages is run or checked; a block that no rule covers fails.

| block | what is done with it |
|---|---|
| toml | a job: validated; part of a job: validated on top of jobs/mnist.toml; else (pyproject) parsed |
| python | run as a program in a copy of the project |
| bash | every command parsed by the program it names; those in `EXECUTED` are run too, in the order of the page |
| console | its lines after `$ ` as bash; the rest is sample output |
| yaml | a valid configuration of pre-commit whose hooks exist, or objects that `kubernetes.patch` takes |
| json | parsed |
| text | drawings: nothing to check |
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
import tomli

from elasticflow.cli.main import COMMANDS, call, group
from elasticflow.errors import EXIT_CODES
from elasticflow.guide.pages import text_of
from elasticflow.jobfile.tables.job import Job
from tests.end_to_end.harness import Project, copy_examples
from tests.fenced_blocks import GUIDE_PAGES, PAGES, ROOT, Block, blocks, commands, parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PYPROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())

EXECUTED = {
    "validate",
    "plan",
    "run",
    "runs",
    "status",
    "why",
    "logs",
    "metrics",
    "report",
    "diff",
    "completion",
    "guide",
    "snapshots",
}
DONE_ELSEWHERE = {("run", "jobs/mnist.toml")}
"""The whole of the main job is run by tests/end_to_end/test_mnist_job.py, typed the same."""
PLACEHOLDER = re.compile(r"://|\.\.\.|[<>$]|\b[A-Z][A-Z_]+\b|--join|--follow|-f\b")
"""A command with one of these speaks of places that are not here (or never ends): parsed, not run."""


def check_command(argv: list[str], folder: Path) -> None:
    """Fail unless the program is known and would take these arguments; *folder*: that of the page."""
    program, arguments = Path(argv[0]).name, argv[1:]
    if re.fullmatch(r"python3?", program) and arguments[:1] == ["-m"]:
        program, arguments = arguments[1], arguments[2:]
    if program == "elasticflow":
        check_elasticflow(arguments)
    elif program == "pip":
        assert arguments[0] in {"install", "download"}
        if "-c" in arguments:
            assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()
        for extra in re.findall(r"\[([a-z0-9,]+)\]", " ".join(arguments)):
            assert set(extra.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
    elif program == "pytest":
        declared = {mark.partition(":")[0] for mark in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
        expression = arguments[arguments.index("-m") + 1] if "-m" in arguments else ""
        assert set(re.findall(r"\w+", expression)) - {"and", "or", "not"} <= declared
    elif program in {"python", "python3", "torchrun", "bash"}:
        files = [word for word in arguments if word.endswith((".py", ".sh"))]
        assert files, f"no program in {argv}"
        # What `plan -o` writes is not here; everything else is.
        assert all(
            (ROOT / name).exists() or (folder / name).exists()
            for name in files
            if Path(name).name not in {"train.py", "torchrun.sh"}
        )
    elif program.startswith("examples."):
        assert (ROOT / f"{program.replace('.', '/')}.py").exists()
    else:
        known = {
            "venv",
            "git",
            "cd",
            "kill",
            "export",
            "cat",
            "ls",
            "pre-commit",
            "jq",
            "sleep",
            "unzip",
            "pkill",
            "docker",
            "kubectl",
            "openssl",
            "chmod",
            "scp",
            "iptables",
            "sbatch",
            "exec",
        }
        assert program in known, f"no rule for `{program}`: add one"


def check_elasticflow(arguments: list[str]) -> None:
    """Fail unless the command exists and takes these options; nothing is run."""
    if arguments[:1] in (["--version"], ["--help"], []):
        return
    name = arguments[0]
    assert name in COMMANDS, f"there is no command `{name}`"
    command = group.get_command(click.Context(group), name)
    assert command is not None
    try:
        command.make_context(name, arguments[1:])
    except click.exceptions.BadParameter as error:
        if not PLACEHOLDER.search(" ".join(arguments)):
            pytest.fail(f"elasticflow {shlex.join(arguments)}: {error.format_message()}")
    except click.exceptions.Exit:
        pass  # --help


# Pages whose commands are typed in one project, one page after the other. Those of examples take minutes:
# tests/end_to_end/test_gallery.py trains them for some steps.
TYPED = [
    GUIDE_PAGES,
    *([page] for page in PAGES if page not in GUIDE_PAGES and not (page.parent / "job.toml").exists()),
]


def page_ids(pages: Sequence[Path] = PAGES) -> list[str]:
    """Return the pages' names for the reports."""
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.fixture
def project(tmp_path: Path, real_processes: None) -> Path:
    """Return a copy of what the pages speak of."""
    copy_examples(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "copy"\nversion = "0"\n')
    return tmp_path


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment in *folder*; threads that wait for others would spin on a busy machine."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=page_ids())
def test_every_page_is_there_and_its_fences_are_paired(page: Path) -> None:
    """No fence is left open, so that no block escapes."""
    fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * sum(block.page == page for block in blocks())


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_block(
    block: Block, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block holds under the rule of its language; a language without a rule fails."""
    monkeypatch.chdir(project)
    match block.language:
        case "bash" | "console":
            lines = commands(block)
            assert lines, "no command in it"
            for line in lines:
                for argv in parts(line.partition(" #")[0]):
                    check_command(argv, block.page.parent)
        case "toml":
            check_toml(block, project, capsys)
        case "python":
            done = run(["-c", block.text], project)
            assert done.returncode == 0, done.stderr
        case "yaml":
            check_yaml(block, project, capsys)
        case "json":
            assert json.loads(block.text)
        case "text":
            pass  # a drawing
        case _:
            pytest.fail(f"{block}: no rule for this language: use one of those at the head of this file")


def check_toml(block: Block, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail unless the block, in the project that is the working folder, is a job, part of one, or a table of another tool."""
    tables = set(tomli.loads(block.text))
    if not tables & set(Job.model_fields):
        return  # another tool's: parsed, and that is all
    if (
        "extends" not in tables
        and "script" not in tables
        and not {"job", "model", "optimizer", "dataset", "train"} <= tables
    ):
        base = (project / "jobs" / "mnist.toml").read_text()
        if "entry" not in tomli.loads(block.text).get("evaluation", {"entry": ""}):
            base = re.sub(
                r"^\[evaluation\]\n(?:[^\[\n].*\n|\n)*", "", base, flags=re.MULTILINE
            )  # the block has several sets
        (project / "jobs" / "base.toml").write_text(base)
        block = block._replace(text=f'extends = "base.toml"\n{block.text}')
    path = project / "jobs" / "block.toml"
    path.write_text(block.text)
    # Several sets stand in place of the one that the main job has.
    without = ["--set=dataset.entry=", "--set=dataset.args="] if "[[dataset.mix]]" in block.text else []
    assert 0 == call(["validate", "jobs/block.toml", *without]), capsys.readouterr()


def check_yaml(block: Block, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail unless the block is a configuration of pre-commit that names our hooks, or fits a manifest."""
    if block.text.startswith("kind:"):
        (project / "site.yaml").write_text(block.text)
        sets = ("image=r/i:1", "patch=site.yaml")
        job = ["jobs/mnist.toml", "--set=nodes.nproc_per_node=1", "--set=snapshots.uri=s3://bucket/x"]
        options = [*job, *(f"--set=kubernetes.{each}" for each in sets)]
        assert 0 == call(["submit", "kubernetes", "--print", *options]), capsys.readouterr()
        return
    path = project / ".pre-commit-config.yaml"
    path.write_text(block.text)
    done = run(["-m", "pre_commit", "validate-config", str(path)], project)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = re.findall(r"- id: *([\w-]+)", (ROOT / ".pre-commit-hooks.yaml").read_text())
    assert set(re.findall(r"- id: *([\w-]+)", block.text)) <= set(ours)


@pytest.mark.timeout(900)
@pytest.mark.e2e
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(pages, id=page_ids(pages)[0], marks=() if pages is GUIDE_PAGES else pytest.mark.nightly)
        for pages in TYPED
    ],
)
def test_commands_of_pages_run(pages: list[Path], project: Path) -> None:
    """The pages' own commands end with 0 when typed one after the other; what an earlier page had is not typed again."""
    typed_before: set[tuple[str, ...]] = set(DONE_ELSEWHERE)
    for page in pages:
        on_this_page = [argv for block in blocks() if block.page == page for argv in typed_in(block)]
        for argv in on_this_page:
            if tuple(argv) not in typed_before:
                done = Project(project).call(*argv)
                # Two that differ are an answer, too.
                good = {0, 1} if argv[0] == "diff" else {0}
                assert done.returncode in good, f"{page}: {shlex.join(argv)}\n{done.stdout}{done.stderr}"
        typed_before.update(map(tuple, on_this_page))


def typed_in(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of those commands of elasticflow in a block that can be run here."""
    if block.language not in {"bash", "console"}:
        return
    for line in commands(block):
        typed = line.partition(" #")[0]
        for argv in parts(typed):
            if Path(argv[0]).name == "elasticflow" and argv[1] in EXECUTED and not PLACEHOLDER.search(typed):
                yield argv[1:]


def test_exit_codes_are_those_of_the_guide() -> None:
    """The guide's table of exit codes is the one in errors.py."""
    rows = re.findall(r"^\| *`?(\d+)`? *\|", text_of("commands"), re.MULTILINE)
    assert [int(row) for row in rows] == sorted(EXIT_CODES)


def test_table_of_the_hand_written_script_is_true() -> None:
    """What the guide's table quotes of train_ddp.py stands there, and the keys it names are the job's."""
    script = (ROOT / "examples" / "ddp_tutorial" / "train_ddp.py").read_text()
    head = r"^\|[^\n]*train_ddp\.py[^\n]*\n\|[-| :]+\n"
    table = re.search(
        rf"{head}((?:\|[^\n]*\n)+)", (ROOT / "elasticflow/guide/adopting.md").read_text(), re.MULTILINE
    )
    assert table, "the guide has no table with train_ddp.py in its head"
    for row in table[1].splitlines():
        left, right = row.strip("|").split(" | ")[:2]
        for quoted in re.findall(r"`([^`]+)`", left):
            assert quoted in script, f"{quoted} is not in train_ddp.py"
        for table_name, key in re.findall(r"`([a-z_]+)\.([a-z_]+)", right):
            assert key in _keys_of(table_name), f"{table_name}.{key} is not a key of the job file"


@cache
def _keys_of(table: str) -> set[str]:
    definitions = Job.model_json_schema()["$defs"]
    name = "".join(word.title() for word in table.split("_")) + "Table"
    return set(definitions[name]["properties"])
