"""What a run would do, in words and as JSON; run as a program, this makes the golden texts again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.cli.main import call
from tests.cli.small_job import JOB as SMALL
from tests.cli.small_job import PIECES

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[3]
PLANS = Path(__file__).parents[1] / "plans"
# Name of a golden text: the job, and what is set.
CASES: dict[str, tuple[str, ...]] = {
    "elastic": (),
    "exact": ("nodes.max=4",),
    "iterable": (),
    "transformer": (),
    "gpu": ("dataset.samples=1000000",),
    "elastic_wide": ("nodes.max=65536", "nodes.nproc_per_node=8", "dataset.global_batch_size=1048576"),
    "exact_sharded": (
        "nodes.max=5",
        "nodes.nproc_per_node=1",
        'parallel={ shard = 2, wrap = ["examples.mnist:Net"] }',
    ),
    "one_worker": ("restarts.budget=0",),
}
RUN = "20261120-120000-0000"
JOB = f"""{SMALL}\
[snapshots]
every = "20 steps"
uri = "s3://bucket/small"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one job, being the working folder."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "small.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _pretend_a_run(project: Path, run_id: str = RUN, *settings: str) -> Path:
    """Write the folder of a run of two workers: 50 samples, 0.5 s a step, snapshots of 2 MB."""
    run = project / "runs" / "small" / run_id
    flags = [f"--set={each}" for each in settings]
    assert call(["plan", "small.toml", "-o", str(run / "launches" / "0001"), *flags]) == 0
    happened: list[dict[str, Any]] = [
        {"event": "generation.started", "world_size": 2},
        {"event": "dataset.opened", "name": "train", "samples": 50},
        {"event": "dataset.opened", "name": "evaluation", "samples": 7},
        {"event": "training.started", "parameters": 66154},
        {"event": "snapshot.committed", "bytes": 2_000_000},
        {"event": "standbys.ready", "node": "n0", "pids": [7, 8], "seconds": 5.13, "memory": 32_400_000},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in happened))
    steps = [{"step": n, "loss": 1.0, "generation": 1, "time": 1000 + n / 2} for n in range(1, 12)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    return run


def _planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert call(["plan", "small.toml", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def _lines_of_facts(lines: Sequence[str]) -> Sequence[str]:
    begin = next(number for number, line in enumerate(lines) if line.startswith("job  "))
    return lines[begin : lines.index("", begin)]


def _facts(lines: Sequence[str]) -> dict[str, str]:
    """Return the facts, above the table, by name, each in one line."""
    found: dict[str, str] = {}
    name = ""
    for line in _lines_of_facts(lines):
        if not line.startswith("  ") or line.startswith(" " * 13):
            name = line[:13].strip() or name
            found[name] = f"{found.get(name, '')} {line[13:]}".strip()
    return found


def _figures(lines: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return amount and source of each figure by its name."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("figure  "))
    columns = [lines[begin].index(title) for title in ("figure", "amount", "from")]
    rows = lines[begin + 1 : lines.index("", begin)]
    return {
        row[: columns[1]].strip(): (row[columns[1] : columns[2]].strip(), row[columns[2] :].strip())
        for row in rows
    }


def made(case: str) -> str:
    """Return the plan of a golden job, in a project of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "pyproject.toml").touch()
        golden = ROOT / "tests" / "compiler" / "golden"
        name = re.sub("_(wide|sharded)$", "", case)
        shutil.copy(golden / name / "job.toml", folder / "job.toml")
        (folder / "tests").symlink_to(ROOT / "tests")
        (folder / "examples").symlink_to(ROOT / "examples")
        before = Path.cwd()
        os.chdir(folder)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
                assert call(["plan", "job.toml", *(f"--set={each}" for each in CASES[case])]) == 0
        finally:
            os.chdir(before)
    return re.sub(r"digest [0-9a-f]{16}", "digest ...", said.getvalue())


@pytest.mark.parametrize("case", CASES)
def test_plans_are_the_golden_ones(case: str) -> None:
    """Jobs of several kinds, each with its plan; made again by `python -m tests.cli.write.test_plan`, then read."""
    assert (PLANS / f"{case}.txt").read_text() == made(case)


@pytest.mark.parametrize("case", CASES)
def test_plans_are_no_wider_than_they_may_be(case: str) -> None:
    """But for commands and lists, which cannot be broken, everything fits where there is no terminal."""
    lines = (PLANS / f"{case}.txt").read_text().splitlines()
    assert [] == [line for line in lines if len(line) > 100 and not line.startswith("    --")]


def test_nothing_is_known_before_the_first_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What data, model and speed tell is said to be unknown, and how it gets known."""
    lines = _planned(capsys)
    facts, figures = _facts(lines), _figures(lines)
    after = "known after the first run, or with --deep"
    assert figures["samples"] == ("-", f"{after}, or set dataset.samples")
    assert figures["steps"] == ("-", "3 epochs")
    assert figures["a step"] == figures["an hour"] == ("-", "known after the first run")
    assert figures["a snapshot"] == ("-", after)
    assert facts["restarts"].endswith("replaced by standbys")
    assert "drift" not in facts
    assert not {"parameters", "training", "evaluations", "a standby"} & figures.keys()


def test_the_newest_run_teaches(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples, speed and the bytes of snapshots come from the newest run, and say so."""
    _pretend_a_run(project, "20261119-120000-0000", "job.seed=9")
    _pretend_a_run(project)
    lines = _planned(capsys)
    facts, source = _facts(lines), f"run {RUN}"
    assert {
        "samples": ("50", source),
        "parameters": ("66,154", source),
        "steps of an epoch": ("6 or 7", "50 samples by 8"),
        "steps": ("19", "3 epochs"),
        "a step": ("0.50 s", f"{source}, with 2 workers"),
        "training": ("about 9.5 s", ""),
        "evaluations": ("3", ""),
        "a snapshot": ("2.0 MB", source),
        "an hour": ("about 360", "720.0 MB"),
        "in all": ("1", "2.0 MB"),
        "that stay": ("at most 1", "2.0 MB, and one more while it is written"),
        "a standby": ("16.2 MB", f"{source}; 5.1 s to get ready"),
    } == _figures(lines)
    assert (
        "every 20 steps, at the end and when asked to leave; in s3://bucket/small the last 3 stay held in each node's "
        "memory, as often as 2 % of the time allows, if half of the free memory has room (2 times the state, 3 while a snapshot is written, if there is room): the death of a worker "
        "or a node costs the steps since then; without, or if all nodes die, those since the last snapshot"
    ) == facts["snapshots"]
    assert f"none since run {RUN}" == facts["drift"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ((), ""),
        (("train.ema=0.9",), " of the averaged weights"),
        (("train.ema=0.9", "evaluation.weights=both"), " of the averaged weights, and of the raw ones"),
        (("train.ema=0.9", "evaluation.weights=raw"), ""),
    ],
)
def test_plan_says_whose_metrics_there_will_be(
    settings: tuple[str, ...], told: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an average they are its, unless the job says otherwise."""
    facts = _facts(_planned(capsys, *(f"--set={each}" for each in settings)))
    assert facts["evaluation"] == f"every 1 epoch and at the end: loss, accuracy{told}"


@pytest.mark.parametrize("source", ["run", "job"])
def test_a_batch_that_swallows_the_data_is_told(
    source: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever knows the samples; training is then a step or two."""
    if source == "run":
        _pretend_a_run(project)
    known = ["--set=dataset.samples=50"] if source == "job" else []
    lines = _planned(capsys, "--set=dataset.global_batch_size=100000", *known)
    facts = _facts(lines)
    by = f" (run {RUN})" if source == "run" else ""
    assert facts["batch"] == (
        f"100,000 samples per step, at every number of nodes; more than the whole dataset, which has 50 samples{by}"
    )
    figures = _figures(lines)
    assert ("1", "50 samples by 100,000") == (figures["steps"][0], figures["steps of an epoch"][1])


def test_what_changed_since_is_not_taken_from_the_run(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another size has other snapshots and another speed; the data is the same."""
    _pretend_a_run(project)
    monkeypatch.setattr("elasticflow.cli.write.plan._WIDTH", 70)
    changes = ["optimizer.args.momentum=0.9", "optimizer.args.lr=0.2", "train.epochs=4", "job.seed=4"]
    (project / "pieces.py").write_text(PIECES.replace("lr)", "lr, momentum=0)"))
    lines = _planned(capsys, *(f"--set={each}" for each in changes))
    facts, figures = _facts(lines), _figures(lines)
    assert figures["steps"] == ("25", "4 epochs")
    another = f"known after the first run (run {RUN} had another optimizer.args.momentum)"
    assert figures["a step"] == ("-", another)
    assert f"since run {RUN}; it cannot continue as this job:" == facts["drift"]
    order = [line.strip() for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert ["would corrupt the run", "changes the trajectory", "harmless"] == order[:3]
    assert 70 >= max(map(len, _lines_of_facts(lines)))


def test_a_run_without_a_snapshot_could_continue_as_any_job(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would begin anew."""
    events = _pretend_a_run(project) / "events.jsonl"
    told = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in told if "snapshot.committed" not in line))
    lines = _planned(capsys, "--set=job.seed=4")
    assert f"since run {RUN}; it could continue as this job:" == _facts(lines)["drift"]


def test_diff_compares_with_the_run_that_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the newest; what resuming with it would say is told."""
    old = "20261119-120000-0000"
    _pretend_a_run(project, old, "train.precision=bf16")
    _pretend_a_run(project)
    facts = _facts(_planned(capsys, "--diff", old))
    assert f"since run {old}; it could continue as this job, with --accept-drift only:" == facts["drift"]
    assert call(["plan", "small.toml", "--diff", "nobody"]) == 2


def test_what_the_compilers_cache_saves_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job that compiles, once a run has shown it; of another one nothing."""
    assert "compiler" not in _facts(_planned(capsys))
    compiled = ("--set", "train.compile=true")
    kept = "its cache is kept for the run on each node, and beside the snapshots for each kind of machine"
    lines = _planned(capsys, *compiled)
    assert f"torch.compile; {kept}" == _facts(lines)["compiler"]
    assert _figures(lines)["compiling"] == ("-", "known after the first run")
    run = _pretend_a_run(project, RUN, "train.compile=true")
    happened = [
        {"event": "training.compiled", "generation": 1, "seconds": 26.7, "from_cache": 0, "compiled": 2},
        {"event": "compiler.cache", "action": "saved", "bytes": 452_648},
        {"event": "training.compiled", "generation": 2, "seconds": 0.41, "from_cache": 2, "compiled": 0},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in happened)
    figures = _figures(_planned(capsys, *compiled))
    assert figures["compiling"] == ("26.7 s", f"run {RUN}; 0.41 s with its cache")
    assert figures["its cache"] == ("452.6 kB", f"run {RUN}")


def test_plan_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--format json prints the same facts; its keys are a promise."""
    _pretend_a_run(project)
    facts = json.loads("\n".join(_planned(capsys, "--format", "json", "--set", "train.epochs=4")))
    source = f"run {RUN}"
    assert {
        "samples": {"value": 50, "source": source},
        "parameters": {"value": 66154, "source": source},
        "snapshot_bytes": {"value": 2_000_000, "source": source},
        "block_bytes": None,
        "step_s": {"value": 0.5, "source": source},
        "standby_bytes": {"value": 16_200_000, "source": source},
        "standby_s": {"value": 5.13, "source": source},
        "compile_s": None,
        "compile_cached_s": None,
        "compiler_cache_bytes": None,
        "workers": {"value": 2, "source": source},
    } == facts["known"]
    assert {
        "steps": 25,
        "steps_per_epoch": [6, 7],
        "duration_s": 12.5,
        "evaluations": 4,
        "snapshots_per_hour": 360.0,
        "snapshots": 2,
        "is_least": False,
        "bytes_per_hour": 720e6,
        "kept": 2,
        "kept_bytes": 4e6,
    } == facts["forecast"]
    assert (50, 25, [6, 7]) == (facts["samples"], facts["steps"], facts["steps_per_epoch"])
    assert ("small", 2, [2, 2]) == (
        facts["job_name"],
        facts["nodes_max"],
        facts["worlds"][1]["samples_per_rank"],
    )
    assert (RUN, "goes on") == (facts["drift"]["run_id"], facts["drift"]["going_on"])
    assert [("train.epochs", "harmless")] == [
        (each["key"], each["weight"]) for each in facts["drift"]["differences"]
    ]


def test_dry_run_is_the_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run --dry-run` prints what `plan` prints."""
    _pretend_a_run(project)
    planned = _planned(capsys, "--set", "train.epochs=5")
    assert call(["run", "small.toml", "--dry-run", "--set", "train.epochs=5"]) == 0
    assert planned == capsys.readouterr().out.splitlines()


def test_dry_run_heeds_the_other_options(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which run it would be, and which nodes are played; what cannot be is refused."""
    _pretend_a_run(project)
    dry = ["run", "small.toml", "--dry-run"]
    said = []
    for options in (["--run-id", "nightly"], ["--run-id", RUN], ["--scale", "1@0s 2!@5s"]):
        capsys.readouterr()
        assert call([*dry, *options]) == 0
        facts = _facts(capsys.readouterr().out.splitlines())
        said.append(facts.get("run") or facts["played"])
    assert [
        "nightly is not here: it is made, or resumed if its snapshots are found",
        f"{RUN} is resumed, by launch 2",
        "nodes on this machine: 1 from 0 s on, then 2 from 5 s on (others are killed)",
    ] == said
    assert call([*dry, "--simulate-nodes", "3"]) == 2
    assert call([*dry, "--run-id", "no/id"]) == 2
    assert call([*dry, "--join", "head:29400"]) == 2


if __name__ == "__main__":
    PLANS.mkdir(exist_ok=True)
    for each in CASES:
        (PLANS / f"{each}.txt").write_text(made(each))
    sys.stdout.write(f"{len(CASES)} plans made: read them\n")
