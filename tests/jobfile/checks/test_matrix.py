"""[matrix]: which cases a file has, what they are called, and that each is the job written out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.errors import CaseError, JobRefusedError
from elasticflow.jobfile.checks.matrix import MOST_CASES
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import has_matrix, load_job, require_cases, require_job

if TYPE_CHECKING:
    from collections.abc import Callable

BASE = Path(__file__).parents[1] / "gallery" / "jobs" / "good_base.toml"
SWEEP = """
[matrix.axes]
optimizer.args.lr = [1e-3, 3e-3]
job.seed = [1, 2]

[[matrix.exclude]]
optimizer.args.lr = 3e-3
job.seed = 2

[matrix.cases.wide]
model.args.width = 64
train.epochs = 7
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a file which extends a good job, and returns its name."""

    def write(lines: str) -> Path:
        path = tmp_path / "sweep.toml"
        path.write_text(f"extends = {json.dumps(str(BASE))}\n{lines}", "utf-8")
        return path

    return write


def errors(path: Path, **options: Any) -> list[str]:
    """Return what is wrong with a file, without help."""
    found = load_job(path, **options).diagnostics
    return [each.message for each in found if each.severity == "error"]


def test_axes_multiply_and_named_cases_follow(written: Callable[[str], Path]) -> None:
    """The last axis changes fastest; what is excluded is left out; a name tells the values."""
    cases = require_cases(written(SWEEP))
    assert ["lr0.001-seed1", "lr0.001-seed2", "lr0.003-seed1", "wide"] == [each.case for each in cases]
    assert has_matrix(written(SWEEP))
    jobs = [each.job for each in cases]
    assert ["shop-lr0.001-seed1", "shop-lr0.001-seed2", "shop-lr0.003-seed1", "shop-wide"] == [
        job.job.name for job in jobs
    ]
    assert [(0.001, 1), (0.001, 2), (0.003, 1)] == [
        (job.optimizer.args["lr"], job.job.seed) for job in jobs[:3]
    ]
    assert ({"width": 64}, 7, 0) == (jobs[3].model.args, jobs[3].train.epochs, jobs[3].job.seed)
    assert {("model", "args", "width"): 64, ("train", "epochs"): 7} == cases[3].changes


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ("train.precision = ['fp32', 'bf16']", ["precision_fp32", "precision_bf16"]),
        ("train.compile = [false, true]", ["compile_false", "compile_true"]),
        ("snapshots.every = ['20 steps', '1 epoch']", ["every20-steps", "every1-epoch"]),
        ("model.entry = ['shop:Net', 'shop:Net2']", ["entry_Net", "entry_Net2"]),
        ("optimizer.args.lr = [1e20, -1.5]", ["lr1e20", "lr-1.5"]),
        (
            "model.args.width = [1]\ndataset.args.width = [2]\njob.seed = [3]",
            ["model.args.width1-dataset.args.width2-seed3"],
        ),
    ],
)
def test_names_of_cases_tell_their_values(
    written: Callable[[str], Path], axes: str, names: list[str]
) -> None:
    """Numbers stand behind the key's last part, texts behind a line; keys that end alike are told apart."""
    loaded = load_job(written(f"[matrix.axes]\n{axes}\n"))
    assert tuple(names) == loaded.cases


# Numbers have few digits: a name of more than a hundred letters is refused.
SCALAR = st.one_of(st.integers(0, 10**6), st.integers(1, 10**4).map(lambda n: n / 1000), st.booleans())
AXES = st.dictionaries(
    st.sampled_from(["job.seed", "optimizer.args.lr", "train.epochs", "nodes.max", "restarts.budget"]),
    st.lists(SCALAR, min_size=1, max_size=4, unique_by=lambda value: (isinstance(value, bool), value)),
    max_size=4,
)


@settings(max_examples=20)
@given(AXES, st.sets(st.from_regex(r"[a-z]{1,5}", fullmatch=True), max_size=3))
def test_there_are_as_many_cases_as_combinations(
    written: Callable[[str], Path], axes: dict[str, list[Any]], named: set[str]
) -> None:
    """The product of the axes, and the named ones; each has a name of its own, whatever their values are worth."""
    lines = "".join(f"{key} = {json.dumps(values)}\n" for key, values in axes.items())
    lines = f"[matrix]\n[matrix.axes]\n{lines}" + "".join(
        f"[matrix.cases.{name}]\n" for name in sorted(named)
    )
    loaded = load_job(written(lines))
    count = (math.prod(map(len, axes.values())) if axes else 0) + len(named)
    assert count == len(loaded.cases) == len(set(loaded.cases))
    assert bool(count) == (codes.NO_CASES not in {each.code for each in loaded.diagnostics})


@settings(max_examples=20)
@given(st.floats(1e-6, 1, allow_nan=False), st.integers(1, 100), st.integers(0, 2**63 - 1))
def test_a_case_is_the_job_written_with_flags(
    written: Callable[[str], Path], lr: float, epochs: int, seed: int
) -> None:
    """But for its name, a case equals the same file with `--set` for each of its keys; flags win over both."""
    flags = [f"optimizer.args.lr={lr}", f"train.epochs={epochs}"]
    by_hand = require_job(BASE, [*flags, "job.name=shop-this", f"job.seed={seed}"]).job
    path = written(f"[matrix.cases.this]\noptimizer.args.lr = {lr}\ntrain.epochs = {epochs}\njob.seed = 5\n")
    assert by_hand == require_job(path, [f"job.seed={seed}"], case="this").job
    path = written(
        f"[matrix.axes]\noptimizer.args.lr = [9, {lr}]\ntrain.epochs = [{epochs}]\njob.seed = [{seed}]\n"
    )
    loaded = require_cases(path)[1].job
    assert by_hand is not None
    assert loaded is not None
    assert by_hand.model_copy(update={"job": loaded.job}) == loaded
    assert loaded.job.seed == seed


def test_flags_change_the_matrix_too(written: Callable[[str], Path]) -> None:
    """An axis is a key like any other: replaced by a flag, taken out by an empty one."""
    flags = ["matrix.axes.job.seed=[7]", "matrix.exclude=", "matrix.cases="]
    assert ("lr0.001-seed7", "lr0.003-seed7") == load_job(written(SWEEP), flags).cases
    assert require_job(written(SWEEP), ["matrix="]).job == require_job(BASE).job


def test_a_base_may_have_the_matrix(written: Callable[[str], Path]) -> None:
    """A file that extends one with cases has them too, with its own keys under theirs."""
    sweep = written(SWEEP)
    path = sweep.with_name("fast.toml")
    path.write_text('extends = "sweep.toml"\n[train]\nepochs = 1\n[matrix.axes]\njob.seed = [1]\n', "utf-8")
    epochs = {each.case: each.job.train.epochs for each in require_cases(path, ["matrix.exclude="])}
    assert {"lr0.001-seed1": 1, "lr0.003-seed1": 1, "wide": 7} == epochs


def test_an_error_names_its_case_and_points_into_the_matrix(written: Callable[[str], Path]) -> None:
    """What some cases have names one and counts them; what all have names none."""
    path = written(
        "[matrix.axes]\ntrain.epochs = [1, 0]\njob.seed = [1, 2]\n[matrix.cases.odd]\nnodes.max = 0\n"
    )
    found = load_job(path, ["restarts.budget=-1"]).diagnostics
    told = {each.message: (each.line, each.column) for each in found if each.severity == "error"}
    assert {
        "train.epochs must be at least 1, not 0 (2 of 5 cases, such as epochs0-seed1)": (3, 20),
        "nodes.max must be at least 1, not 0 (case odd)": (6, 13),
        "restarts.budget must be at least 0, not -1": (1, 17),
    } == told


def test_an_axis_is_a_key_that_the_job_has(written: Callable[[str], Path]) -> None:
    """That of an evaluation set with a name, too; of a wrong one the part that is wrong is named."""
    sets = '[evaluation.val]\nentry = "shop:Images"\nargs = { split = "val" }\n[matrix.axes]\n'
    assert [20, 30] == [
        each.job.evaluation["val"].samples
        for each in require_cases(written(f"{sets}evaluation.val.samples = [20, 30]\n"))
        if isinstance(each.job.evaluation, dict)
    ]
    for axis, column, message in (
        ("optimiser.args.lr", 1, "unknown table [optimiser]"),
        ("optimizer.arg.lr", 11, 'unknown key "arg" in [optimizer]'),
    ):
        told = load_job(written(f"[matrix.axes]\n{axis} = [1, 2]\n")).diagnostics
        assert [(message, column)] == [(e.message, e.column) for e in told if e.severity == "error"]


def test_one_case_is_judged_alone(written: Callable[[str], Path]) -> None:
    """A mistake in another case does not keep this one from running."""
    path = written("[matrix.axes]\ntrain.epochs = [1, 0]\n")
    assert require_job(path, case="epochs1").case == "epochs1"
    with pytest.raises(JobRefusedError, match="must be at least 1, not 0"):
        require_job(path, case="epochs0")
    with pytest.raises(JobRefusedError, match="case epochs0"):
        require_cases(path)


def test_a_wrong_matrix_hides_nothing_else(written: Callable[[str], Path]) -> None:
    """The rest of the file is checked too, but for what a case might give."""
    path = written("[matrix.axes]\njob.seed = 5\n[ddp]\nbucket = 1\n")
    assert [
        "the axis job.seed must be a list of values, not 5",
        'unknown key "bucket" in [ddp]',
    ] == errors(path)


def test_absurd_products_are_refused_before_they_are_made(written: Callable[[str], Path]) -> None:
    """A file of a few lines may ask for more cases than there are atoms."""
    values = list(range(10))
    keys = [f"model.args.a{number}" for number in range(300)]  # a product of 300 digits
    path = written("[matrix.axes]\n" + "".join(f"{key} = {values}\n" for key in keys))
    (message,) = errors(path)
    assert (
        message
        == f"the matrix makes more than 1,000,000,000,000 cases, and at most {MOST_CASES:,} are allowed"
    )


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (SWEEP, {}, "is 4 jobs, one for each case of its [matrix]"),
        (SWEEP, {"case": "wid"}, 'did you mean "wide"?'),
        (SWEEP, {"case": "x"}, "cases: lr0.001-seed1, lr0.001-seed2, lr0.003-seed1, wide"),
        ("", {"case": "x"}, "has no [matrix], so there is no case x"),
    ],
)
def test_a_case_must_be_said_and_be_there(
    written: Callable[[str], Path], lines: str, options: dict[str, str], words: str
) -> None:
    """The answer lists the cases, or the nearest one."""
    with pytest.raises(CaseError) as caught:
        require_job(written(lines), **options)  # type: ignore[arg-type]  # only `case` is among them
    assert words in str(caught.value)


def test_all_cases_of_a_file_without_any(written: Callable[[str], Path]) -> None:
    """Such a file is one job."""
    with pytest.raises(CaseError, match="it is one job"):
        require_cases(written(""))


def test_cases_share_what_was_found_out(written: Callable[[str], Path]) -> None:
    """A table that two cases have alike is one object; equal numbers of other types are not alike."""
    path = written("[matrix.axes]\njob.seed = [1, 2]\n[matrix.cases.a]\nmodel.args.width = 1\n"
                   "[matrix.cases.b]\nmodel.args.width = 1.0\n[matrix.cases.c]\nmodel.args.width = true\n")  # fmt: skip
    jobs = [each.job for each in require_cases(path)]
    assert jobs[0].model is jobs[1].model
    assert jobs[0].ddp is jobs[1].ddp
    assert ["1", "1.0", "True"] == [repr(job.model.args["width"]) for job in jobs[2:]]
