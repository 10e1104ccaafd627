"""`elasticflow metrics`: what was measured, newest last, as a table, as JSON, as curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.observe.hand_made import RUN_ID, evaluation, make_run, step

if TYPE_CHECKING:
    from collections.abc import Callable

Ran = tuple[int, str, str]


@pytest.fixture
def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Return a function that runs `elasticflow metrics` in a project whose run has measured something."""
    (tmp_path / "pyproject.toml").touch()
    folder = make_run(tmp_path)
    lines = [
        *(step(n / 20, n) for n in range(1, 31)),
        {**evaluation(2, 30, 0.9, 0.95), "eval_raw": {"loss": 0.2}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        code = call(["metrics", *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_newest_come_last(ran: Callable[..., Ran]) -> None:
    """So many lines as asked, evaluations among them; a column for each quantity."""
    code, out, _ = ran("--tail", "3")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == [
        "step",
        "epochs",
        "loss",
        "lr",
        "eval",
        "loss",
        "eval",
        "accuracy",
        "best",
        "eval",
        "raw",
        "loss",
    ]
    assert [row.split() for row in rows] == [
        ["29", "1", "0.0690", "0.0030", "-", "-", "-", "-"],
        ["30", "1", "0.0667", "0.0030", "-", "-", "-", "-"],
        ["30", "1", "-", "-", "0.1000", "0.9000", "0.9500", "0.2000"],
    ]
    assert len(ran()[1].splitlines()) == 21
    assert len(ran("--tail", "0")[1].splitlines()) == 32


def test_only_what_is_asked_for(ran: Callable[..., Ran]) -> None:
    """Names with a star; lines that have none of them are left out."""
    _, out, _ = ran("--only", "eval *")
    assert len(out.splitlines()) == 2
    assert "lr" not in out
    code, out, err = ran("--only", "absent")
    assert (code, out) == (0, "")
    assert err.startswith("nothing of that name was measured in ")
    assert "help: there are: best, eval accuracy, " in err


def test_so_many_lines_of_what_is_asked_for(ran: Callable[..., Ran]) -> None:
    """An evaluation is found behind the steps after it; a program gets the same selection, with its place."""
    with (Path("runs/mnist") / RUN_ID / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(step(2, number)) + "\n" for number in range(31, 61))
    _, out, _ = ran("--only", "eval accuracy", "--only", "best", "--tail", "1")
    assert [line.split() for line in out.splitlines()] == [
        ["step", "epochs", "eval", "accuracy", "best"],
        ["30", "1", "0.9000", "0.9500"],
    ]
    records = json.loads(ran("--only", "eval acc*", "--only", "lr", "--tail", "31", "--format", "json")[1])
    assert records[0] == {"step": 30, "epoch": 1, "eval": {"accuracy": 0.9}}
    assert records[-1] == {"step": 60, "epoch": 3, "lr": 0.003}
    assert "eval accuracy" in ran("--only", "absent")[2]


def test_a_plot_is_no_json(ran: Callable[..., Ran]) -> None:
    """Both together are refused, not one of them ignored."""
    code, out, err = ran("--plot", "--format", "json")
    assert (code, out) == (2, "")
    assert "--plot draws for people" in err


def test_curves_without_a_finite_number(ran: Callable[..., Ran]) -> None:
    """They are named, not passed over."""
    line = {**step(1, 1), "loss": "nan"}
    (Path("runs/mnist") / RUN_ID / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert ran("--plot") == (0, "loss  no finite number\n\n", "")


def test_a_program_gets_the_records(ran: Callable[..., Ran]) -> None:
    """As they are written."""
    records = json.loads(ran("--format", "json", "--tail", "2")[1])
    assert [record["step"] for record in records] == [30, 30]
    assert records[1]["eval"] == {"accuracy": 0.9, "loss": 0.1}


def test_curves_are_drawn(ran: Callable[..., Ran]) -> None:
    """Loss and evaluations, unless others are asked for."""
    _, out, _ = ran("--plot")
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith(("loss", "eval", "lr"))] == [
        "loss",
        "eval accuracy",
        "eval loss",
        "eval raw loss",
    ]
    assert "step 30, logarithmic" in out
    code, out, err = ran("--plot", "--only", "absent")
    assert (code, out) == (0, "")
    assert err.startswith("nothing of that name was measured in ")
    assert "help: there are: eval accuracy, " in err


def test_nothing_was_measured_yet(ran: Callable[..., Ran]) -> None:
    """No error: the run may have begun this moment."""
    (Path("runs/mnist") / RUN_ID / "metrics.jsonl").unlink()
    code, out, err = ran()
    assert (code, out) == (0, "")
    assert err.startswith("nothing was measured yet in ")


def test_a_script_that_tells_no_steps_has_no_measurements(ran: Callable[..., Ran]) -> None:
    """The reason is said, with the remedy."""
    folder = Path("runs/mnist") / RUN_ID
    (folder / "metrics.jsonl").unlink()
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "script": "train.py", "step": 0}))
    assert "its script tells no steps, as it would with elasticflow.join" in ran()[2]
