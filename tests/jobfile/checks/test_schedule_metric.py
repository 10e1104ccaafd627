"""Schedules that go by a metric of the evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.load import load_job
from tests.jobfile.checks.test_all import JOB

if TYPE_CHECKING:
    from pathlib import Path

PLATEAU = 'entry = "torch.optim.lr_scheduler:ReduceLROnPlateau"'
COSINE = 'entry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 100 }'
SET = 'entry = "torch.utils.data:TensorDataset"'
OF_METRIC = 'interval = "evaluation"\nmetric = '


@pytest.mark.parametrize(
    ("scheduler", "evaluation", "place", "said"),
    [
        (PLATEAU, f"[evaluation]\n{SET}", "entry", "lr_scheduler names none"),
        (f'{PLATEAU}\ninterval = "evaluation"', f"[evaluation.val]\n{SET}", "entry", 'metric = "val.loss"'),
        (f'{PLATEAU}\nmetric = "loss"', f"[evaluation]\n{SET}", "metric", 'interval is "step"'),
        (f'entry = "own:Late"\n{OF_METRIC[:23]}', "", "interval", "[evaluation] with the data"),
        (f'{PLATEAU}\n{OF_METRIC}"loss"', "", "metric", "no [evaluation] that measures it"),
        (f'{PLATEAU}\n{OF_METRIC}"los"', f"[evaluation]\n{SET}", "metric", 'did you mean "loss"?'),
        (f'{PLATEAU}\n{OF_METRIC}"loss"', f"[evaluation.val]\n{SET}", "metric", 'did you mean "val.loss"?'),
        (f'{COSINE}\n{OF_METRIC}"loss"', f"[evaluation]\n{SET}", "entry", "takes no metric"),
        (
            f'{PLATEAU}\n{OF_METRIC}"val.loss"',
            f'[evaluation.val]\n{SET}\nevery = ["5 steps", "10 min"]',
            "every",
            "goes by the clock",
        ),
        (
            f'{PLATEAU}\nargs = {{ mode = "max" }}\n{OF_METRIC}"loss"',
            f"[evaluation]\n{SET}",
            "metric",
            "loss is better where it is smaller",
        ),
        (f'{PLATEAU}\n{OF_METRIC}"val.loss"', f"[evaluation.val]\n{SET}", "", ""),
        (f'entry = "own:Late"\n{OF_METRIC}"loss"', f'[evaluation]\n{SET}\nevery = "5 steps"', "", ""),
    ],
)
def test_the_metric_is_one_that_an_evaluation_measures(
    tmp_path: Path, scheduler: str, evaluation: str, place: str, said: str
) -> None:
    """Each mistake has its place and a remedy; a schedule whose metric is measured has no problem."""
    rest = f"[lr_scheduler]\n{scheduler}\n{evaluation}\n"
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(train="steps = 100", dataset="", batch=64, rest=rest))
    found = [each for each in load_job(file).diagnostics if each.code == "EF305"]
    if not said:
        assert found == []
        return
    (problem,) = found
    assert said in f"{problem.message}\n{problem.help}"
    assert problem.excerpt is not None
    assert problem.excerpt.startswith(place)


def test_each_key_that_names_an_unmeasured_metric_is_told(tmp_path: Path) -> None:
    """At once, also where `best` is wrong besides; a name in other capitals is the one that was meant."""
    file = tmp_path / "job.toml"
    rest = f'[lr_scheduler]\n{PLATEAU}\n{OF_METRIC}"los"\n[evaluation]\n{SET}\nbest = "min LOSS"\n'
    train = 'steps = 100\nstop_when = "loos below 1"'
    file.write_text(JOB.format(train=train, dataset="", batch=64, rest=rest))
    found = [each for each in load_job(file).diagnostics if each.severity == "error"]
    assert ["EF303", "EF305", "EF325"] == sorted(each.code for each in found)
    assert 'did you mean "min loss"?' in {each.help for each in found}


@pytest.mark.parametrize(
    ("lines", "is_wrong"),
    [
        ('args = { interval = "epoch" }', True),
        ('interval = "epoch"', True),
        ('args = { interval = "epoch" }\ninterval = "epoch"', False),
        ("", False),
    ],
)
def test_the_schedule_of_a_lightning_module_is_stepped_when_the_module_says(
    tmp_path: Path, lines: str, is_wrong: bool
) -> None:
    """The module's interval is compared with the argument: the job's own interval must be the same."""
    file = tmp_path / "job.toml"
    rest = f'[lr_scheduler]\nentry = "elasticflow.lightning:lr_scheduler"\n{lines}\n'
    file.write_text(JOB.format(train="steps = 100", dataset="", batch=64, rest=rest))
    assert ["EF106"] * is_wrong == [
        each.code for each in load_job(file).diagnostics if each.severity == "error"
    ]
