"""The job's own code tried out in a child process: what is wrong is found, whatever the code does."""

from __future__ import annotations

import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.write.deep_options import DeepRequest, cases_alike, try_out_loaded
from elasticflow.deep import check
from elasticflow.deep import check as deep_check
from elasticflow.deep.check import DeepReport, diagnostics_of, report_of, request_of, try_out
from elasticflow.deep.child import data
from elasticflow.deep.child.main import Probe
from elasticflow.deep.child.report import Report
from elasticflow.deep.child_process import ChildEnd
from elasticflow.deep.messages import Facts
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job, require_job
from elasticflow.jobfile.text.source import load_source
from tests.command_line import forks
from tests.deep.deep_projects import PROJECTS, Project, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.jobfile.tables.job import Job


TAME = [name for name, project in PROJECTS.items() if not project.is_wild]
WILD = [name for name, project in PROJECTS.items() if project.is_wild]
FREEZES_FOR_A_WHILE = (
    "self.register_forward_pre_hook(lambda me, *_: [me.outer.bias.requires_grad_(True)] and None); "
    "self.register_forward_hook(lambda me, *_: [me.outer.bias.requires_grad_(False)] and None)"
)


@pytest.fixture(autouse=True)
def project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of one's own; what is imported there is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "_QUICK_S", float("inf"))  # data is opened again, however slow the machine is
    monkeypatch.setattr(sys, "path", [*sys.path])
    with forks():
        yield tmp_path
    sys.modules.pop("shop", None)


def _job(folder: Path, project: Project) -> Job:
    job = require_job(write(folder, project)).job
    assert job is not None
    return job


def _look_here(folder: Path, project: Project) -> DeepReport:
    """Return what the child's part tells of *project*, run in this process."""
    return _tried_here(_job(folder, project), folder, takes_step=project.deep_step)


def _tried_here(job: Job, folder: Path, *, takes_step: bool) -> DeepReport:
    request = request_of(job, folder, takes_step=takes_step)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as told:
        with os.fdopen(writing, "wb"):
            report = Report(writing, request.own)
            Probe(report, request).run()
            report.end()
        messages = [json.loads(line) for line in told]
    return report_of(ChildEnd(0, messages, "", []), request.own, 1.0)


def _require_found(project: Project, report: DeepReport) -> None:
    found = diagnostics_of(report, load_source(Path("job.toml")))
    assert (project.found is not None) == bool(found), found
    for each in found:
        assert project.found is not None
        code, key, message = project.found
        excerpt = each.excerpt or ""
        assert (code, True, True) == (each.code, excerpt.startswith(key), message in each.message), each


@pytest.mark.parametrize("name", TAME)
def test_what_is_wrong_is_found_at_its_key(name: str, tmp_path: Path) -> None:
    """Each job is wrong in one way: one finding, with its code, at its key."""
    _require_found(PROJECTS[name], _look_here(tmp_path, PROJECTS[name]))


@pytest.mark.parametrize(
    ("old", "new", "deep_step", "remedy"),
    [
        (
            "    def forward(self, inputs):\n",
            "torch.distributed.barrier()",
            True,
            "leave collectives of its own",
        ),
        (
            "        super().__init__()\n",
            "torch.distributed.barrier()",
            False,
            "every worker has a whole replica",
        ),
        (
            "        super().__init__()\n",
            "raise ValueError('FSDP')",
            False,
            "every worker has a whole replica",
        ),
        (
            "    def forward(self, inputs):\n",
            "raise RuntimeError('Lit is not attached to a `Trainer`.')",
            True,
            "trained as a plain model, without a Trainer",
        ),
    ],
)
def test_a_limit_is_named(old: str, new: str, deep_step: bool, remedy: str, tmp_path: Path) -> None:
    """Collectives of one's own, sharded models, Lightning's logging: what cannot work, and what to do instead."""
    found = _look_here(tmp_path, Project(old, f"{old}        {new}\n", None, deep_step=deep_step)).problems
    assert found
    assert all(remedy in each.remedy for each in found)


def test_what_a_step_freezes_for_a_while_is_trained(tmp_path: Path) -> None:
    """As a GAN's step does with one of its halves: what can be trained is told of the model as it is built."""
    old = "        self.outer = nn.Linear(width, 3)\n"
    project = Project(old, f"{old}        {FREEZES_FOR_A_WHILE}\n", None, deep_step=True)
    assert _look_here(tmp_path, project).facts.trainable == 83


@pytest.mark.integration
@pytest.mark.parametrize("name", WILD)
def test_code_that_does_what_it_likes_is_told_and_ended(name: str, tmp_path: Path) -> None:
    """Code that hangs, exits, crashes, prints rubbish or starts processes: found, and nothing lives afterwards."""
    project = PROJECTS[name]
    job = _job(tmp_path, project)
    seen: list[str] = []
    # A busy machine takes longer to come to code that hangs.
    limits_s = iter((2.0, 6.0, 15.0, 60.0) if name == "hangs" else (60.0,))
    found = try_out(job, tmp_path, limit_s=next(limits_s), watch=seen.append)
    for limit_s in limits_s:
        if seen[-1] == "importing shop":
            break
        found = try_out(job, tmp_path, limit_s=limit_s, watch=seen.append)
    assert seen[0] == "importing torch", "whoever waits is told what for"
    if name == "hangs":
        assert seen[-1] == "importing shop"

    _require_found(project, found)

    assert [] == [path for path in Path("/proc").glob("[0-9]*") if _is_left(path, tmp_path)]


def _is_left(process: Path, folder: Path) -> bool:
    """Return whether it was started in *folder*: another process of pytest may run the same test."""
    try:
        is_started = (process / "cmdline").read_bytes() == b"sleep\x00987\x00"
        return is_started and (process / "cwd").samefile(folder)
    except OSError:
        return False


def test_what_is_learnt_of_a_good_job(tmp_path: Path) -> None:
    """Samples, parameters and the bytes of a snapshot: the same on the meta device and after a step on the CPU."""
    project = PROJECTS["good"]

    quick, thorough = (
        _look_here(tmp_path, project._replace(deep_step=takes_step)).facts.known()
        for takes_step in (False, True)
    )

    assert quick == {
        "samples": 50,
        "sample": "(float32 (4,), int)",
        "parameters": 83,
        "trainable": 83,
        "snapshot_bytes": 1092,
    }
    assert quick == {key: value for key, value in thorough.items() if key != "loss"}


@pytest.mark.parametrize(
    ("line", "is_on_meta"),
    [
        ("self.inner.bias = self.norm.bias", True),
        ("self.again = self.inner", True),
        ("self.outer.weight = nn.Parameter(self.outer.weight.t().contiguous().t())", True),
        ("self.register_buffer('count', torch.tensor(3, dtype=torch.int8))", True),
        ("self.inner.weight.requires_grad_(False)", True),
        ("assert float(torch.ones(2).sum()) == 2", False),
    ],
)
def test_bytes_are_the_same_with_and_without_memory(tmp_path: Path, line: str, is_on_meta: bool) -> None:
    """Tied, laid out otherwise, shared or frozen: what the meta device tells, real tensors tell, too."""
    old = "        self.outer = nn.Linear(width, 3)\n"
    project = Project(old, f"{old}        {line}\n", None)

    reports = [_look_here(tmp_path, project._replace(deep_step=takes_step)) for takes_step in (False, True)]

    quick, thorough = (report.facts.known() for report in reports)
    assert quick["snapshot_bytes"] >= 800
    assert quick == {key: value for key, value in thorough.items() if key != "loss"}
    assert is_on_meta == (reports[0].notes == ())


def _sharded(
    tmp_path: Path,
    parallel: str,
    *,
    takes_step: bool = False,
    width: int = 8,
    project: Project = PROJECTS["good"],
    look: Callable[..., DeepReport] = _tried_here,
) -> DeepReport:
    """Return what is found of *project*'s job, with these keys in [parallel] and two workers; a step needs a child."""
    more = f"{project.more}\n[nodes]\nnproc_per_node = 2\n[parallel]\nshard = 2\n{parallel}\n"
    file = write(tmp_path, project._replace(more=more))
    text = file.read_text(encoding="utf-8")
    exact = 'epochs = 2\nconsistency = "exact"\nvirtual_shards = 4'
    text = text.replace("epochs = 2", exact).replace("width = 8", f"width = {width}")
    file.write_text(text, encoding="utf-8")
    job = require_job(file).job
    assert job is not None
    return look(job, tmp_path, takes_step=takes_step)


@pytest.mark.integration
@pytest.mark.parametrize("init", [pytest.param("cpu", marks=pytest.mark.nightly), "meta"])
def test_a_step_of_the_sharded_model_is_tried(tmp_path: Path, init: str) -> None:
    """Facts and findings are those of the whole model; then it is sharded, and steps once more."""
    report = _sharded(tmp_path, f'wrap = ["torch.nn:Linear"]\ninit = "{init}"', takes_step=True, look=try_out)
    assert ((), 83, 4 * 40) == (report.problems, report.facts.parameters, report.facts.block_bytes)
    assert "two steps of the sharded model were tried, with one worker that holds all rows" in report.notes


def test_without_a_step_the_model_is_looked_at_as_a_whole(tmp_path: Path) -> None:
    """The note says so."""
    report = _sharded(tmp_path, 'wrap = ["torch.nn:Linear"]')
    assert "the model was looked at as a whole: [parallel] cuts it when workers train" in report.notes


@pytest.mark.integration
def test_a_step_that_calls_a_part_of_the_sharded_model_is_refused(tmp_path: Path) -> None:
    """Right for the whole model, wrong for a part of it that is not gathered: what a launch would end with."""
    step = """
def by_parts(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model.outer(model.norm(model.inner(inputs)).relu()), targets)


class Digits:"""
    project = PROJECTS["good"]._replace(
        old="class Digits:",
        new=step,
        job=('loss = "torch.nn.functional:cross_entropy"', 'step = "shop:by_parts"'),
    )
    problems = _sharded(
        tmp_path, 'wrap = ["torch.nn:BatchNorm1d"]', takes_step=True, project=project, look=try_out
    ).problems
    (problem,) = [problem for problem in problems if problem.key == "model.step"]
    assert problem.message.endswith("code computes with parameters of a sharded model that are not gathered")
    assert problem.remedy.startswith("call the whole model, as in model(x)")


@pytest.mark.parametrize(
    ("wrap", "key", "said"),
    [
        ("", "parallel.shard", "the model has no ModuleList whose elements could be sharded one by one"),
        ('wrap = ["torch.nn:Conv2d"]', "parallel.wrap", "torch.nn:Conv2d is named in wrap"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_before_it_is_launched(
    tmp_path: Path, wrap: str, key: str, said: str
) -> None:
    """As workers would refuse it."""
    (problem,) = _sharded(tmp_path, wrap).problems
    assert key == problem.key
    assert said in problem.message
    assert problem.remedy


def test_a_model_that_no_machine_holds_whole_is_looked_at_without_a_step(tmp_path: Path) -> None:
    """Three hundred thousand million parameters: counted, in memory that is never touched."""
    report = _sharded(
        tmp_path, 'wrap = ["torch.nn:Linear"]\ninit = "meta"', takes_step=True, width=30_000_000_000
    )
    assert () == report.problems
    assert 300_000_000_003 == report.facts.parameters
    assert any(note.startswith("no step was tried: it would need 4,800 GB") for note in report.notes)


@pytest.mark.integration
def test_validate_shows_the_frames_of_the_jobs_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finding names the line that raised and nothing of ours; a job with errors is not tried out."""
    write(tmp_path, PROJECTS["build_raises"])
    (tmp_path / "other.toml").write_text("[job]\n")

    assert call(["validate", "--deep", "job.toml", "other.toml"]) == 1

    said = capsys.readouterr().out
    assert "  = help: at shop.py:9, in __init__: raise ValueError('width must be a multiple of 3')\n" in said
    assert "probe" not in said
    assert "job.toml: 50 samples of (float32 (4,), int)\n" in said
    assert "other.toml: not tried out: it has errors\n" in said


@pytest.mark.integration
def test_plan_learns_from_the_jobs_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts of `plan --deep` say so, and what is wrong goes to standard error: exit code 1."""
    write(tmp_path, PROJECTS["optimizer_raises"])

    assert call(["plan", "--deep", "--format", "json", "job.toml"]) == 1

    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert {"value": 50, "source": "--deep"} == facts["known"]["samples"]
    assert (13, None) == (facts["steps"], facts["known"]["snapshot_bytes"])
    assert "error[EF502]: building the optimizer raises ValueError: Invalid learning rate: -1.0" in said.err


def test_what_is_known_better_now_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval that never comes is one finding, though the length of training is known more exactly by --deep."""
    path = write(tmp_path, PROJECTS["good"])
    path.write_text(f'{path.read_text()}\n[snapshots]\nevery = "500 epochs"\n')
    monkeypatch.setattr(check, "try_out", lambda *_, **__: DeepReport((), Facts(samples=50), ()))
    loaded = load_job(path)
    assert [each.code for each in loaded.diagnostics if each.severity == "warning"] == [codes.NEVER_DUE]
    assert try_out_loaded(loaded, DeepRequest(takes_step=False, limit_s=1))[1] == []


@pytest.mark.integration
def test_cases_are_tried_out_once_where_they_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four cases two differ in the seed alone; the finding names its case, and stands at the axis."""
    path = write(tmp_path, PROJECTS["good"])
    path.write_text(
        f"{path.read_text()}\n[matrix.axes]\njob.seed = [1, 2]\noptimizer.args.lr = [0.1, -1.0]\n"
    )

    assert call(["validate", "--deep", "--format", "concise", "job.toml"]) == 1

    said = capsys.readouterr().out.splitlines()
    assert 4 == len(said)
    place = path.read_text().splitlines().index("optimizer.args.lr = [0.1, -1.0]") + 1
    assert said[0].startswith(f"job.toml:{place}:")
    assert "Invalid learning rate: -1.0 (case seed1-lr-1.0 and 1 more)" in said[0]
    assert (
        "job.toml (case seed1-lr0.1 and 1 more): 50 samples of (float32 (4,), int); 83 parameters" in said[1]
    )


@pytest.mark.parametrize(
    "axis", ['hooks.on_step = ["m:a", "m:b"]', "parallel.shard = [1, 2]", 'env.SIZE = ["1", "2"]']
)
def test_cases_whose_code_or_surroundings_differ_are_not_alike(tmp_path: Path, axis: str) -> None:
    """Each is tried out: what holds for one may fail in the other."""
    path = write(tmp_path, PROJECTS["good"])
    (tmp_path / "m.py").write_text("def a(context): ...\ndef b(context): ...\n")
    path.write_text(f"{path.read_text()}\n[matrix.axes]\n{axis}\njob.seed = [1, 2]\n")
    assert [2, 2] == [len(group) for group in cases_alike(load_job(path), ())]


def test_references_are_looked_up_where_code_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's code sees what it sees in a run; a variable that is not set here is a warning, as other lacks are."""
    path = write(tmp_path, PROJECTS["good"])
    path.write_text(f'{path.read_text()}\n[env]\nPLACE = "${{env:WHERE_DATA_LIES}}"\n')
    seen: list[Job] = []

    def tried(job: Job, *_: object, **__: object) -> DeepReport:
        seen.append(job)
        return DeepReport((), Facts(), ())

    monkeypatch.setattr(check, "try_out", tried)
    monkeypatch.setenv("WHERE_DATA_LIES", "/data")
    assert call(["validate", "--deep", "job.toml"]) == 0
    assert [{"PLACE": "/data"}] == [job.env and job.env.values() for job in seen]
    capsys.readouterr()
    monkeypatch.delenv("WHERE_DATA_LIES")
    assert call(["validate", "--deep", "job.toml"]) == 0
    told = capsys.readouterr().out
    assert "warning[EF008]: the variable WHERE_DATA_LIES is not set, and env.PLACE needs it" in told
    assert "job.toml: not tried out: it has errors with this machine's variables" in told
    assert 1 == len(seen)


def test_without_torch_nothing_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said so, as a warning; no process is started."""
    write(tmp_path, PROJECTS["good"])
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "torch" else find(name))

    assert call(["validate", "--deep", "job.toml"]) == 0

    assert (
        "warning[EF511]: --deep cannot tell anything here: torch is not installed" in capsys.readouterr().out
    )


def test_a_child_that_any_signal_ends_is_told() -> None:
    """Signals without a name of their own, too."""
    report = report_of(ChildEnd(-40, [], "", []), [], 1.0)
    assert [each.message for each in report.problems] == [
        "starting Python and torch ended the process with signal 40"
    ]


def test_a_folder_that_begins_like_the_package_is_the_jobs_own(project_folder: Path) -> None:
    """Frames in ~/elasticflow_jobs are shown if the package lies in ~/elasticflow."""
    package = Path(deep_check.__file__).parents[1]
    beside = package.with_name(f"{package.name}_jobs")
    report = Report(0, [str(beside)])
    assert report._is_own(str(beside / "model.py"))
    assert not report._is_own(str(package / "errors.py"))
