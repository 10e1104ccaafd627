"""The call by which a process joins a run."""

from __future__ import annotations

import builtins
import json
import sys
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest

import elasticflow
from elasticflow.errors import StateError
from elasticflow.runtime.loop.join import _note_exits
from elasticflow.runtime.loop.training_loop import TrainingLoop
from tests.forked import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

GENERATED = ROOT / "tests" / "compiler" / "golden" / "one_worker" / "train.py"


def test_an_edited_train_py_of_an_earlier_version_still_trains(
    plain_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    """It calls `elasticflow.join` with the digest of its job."""
    text = GENERATED.read_text()
    assert "    run = join_job(\n" in text
    text = text.replace("join_job(", "elasticflow.join(").replace("STEPS = 200", "STEPS = 3")
    text = text.replace('compare_replicas="1000 steps"', 'compare_replicas="2 steps", measures=Measures()')
    text = text.replace(
        "from elasticflow.runtime.loop.join import join_job",
        "from elasticflow.runtime.measuring.speed import Measures",
    )
    (tmp_path / "train.py").write_text(
        text.replace('(HERE / "../../../..").resolve()', f"Path({str(ROOT)!r})")
    )
    done = plain_python("train.py")

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3]
    assert any(line["event"] == "training.finished" for line in lines)


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        (None, "without run.gradients nothing exchanges gradients of a model that workers share"),
        (
            elasticflow.Gradients(moves_optimizers=True),
            "gradients of a model that workers share are added up before one optimizer moves",
        ),
    ],
)
def test_a_model_is_shared_only_where_the_run_adds_up_gradients(
    gradients: elasticflow.Gradients | None, said: str
) -> None:
    """Refused before the process joins anything, with a remedy."""
    with pytest.raises(StateError, match=said) as refused:
        elasticflow.join(shard=2, gradients=gradients)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": -1}, r"join\(seed=-1\): must be a whole number from 0"),
        ({"seed": 1.5}, r"join\(seed=1.5\)"),
        ({"keep": 0}, r"join\(keep=0\): must be a whole number from 1"),
        ({"log_every": 0}, r"join\(log_every=0\)"),
        ({"threads": 0}, r"join\(threads=0\)"),
        ({"every": "5 parsecs"}, r"join\(every='5 parsecs'\): must have one of the units steps"),
        ({"every": ("1 epoch", "soon")}, r"join\(every='soon'\)"),
        ({"log_level": "loud"}, r"join\(log_level='loud'\): there is no such level"),
        ({"virtual_shards": 0}, r"virtual_shards=0: must be a whole number from 1"),
        (
            {"virtual_shards": 4, "gradients": elasticflow.Gradients(virtual_shards=8)},
            "virtual_shards=4, and gradients with 8",
        ),
        (
            {"virtual_shards": 4, "gradients": elasticflow.Gradients(moves_optimizers=True)},
            r"moves_optimizers=True\) was given virtual shards",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    """Before the process joins anything."""
    with pytest.raises(StateError, match=said):
        elasticflow.join(**arguments)


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"on_nonfinite": "ignore"}])
def test_options_that_no_step_knows_are_refused(options: dict[str, Any]) -> None:
    """A precision with a slip of the pen would train in fp32."""
    with pytest.raises(StateError, match="must be one of"):
        elasticflow.Gradients(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"moves_optimizers": True, "precision": "bf16"}, "the function makes the forwards itself"),
        ({"moves_optimizers": True, "on_nonfinite": "skip"}, "an optimizer may have moved by then"),
        ({"clip_grad_norm": 1.0}, "would clip nothing"),
    ],
)
def test_options_of_another_kind_of_step_are_refused(options: dict[str, Any], said: str) -> None:
    """They would have no effect, and the weights would be others than those that were asked for."""
    with pytest.raises(StateError, match=said):
        elasticflow.Gradients(**options)
    elasticflow.Gradients(moves_optimizers=True, clip_grad_norm=1.0)


def test_virtual_shards_are_an_option_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other options they count, too."""
    chosen: list[elasticflow.Gradients] = []

    def joined(own: Any, folder: Any, gradients: elasticflow.Gradients, **more: Any) -> None:
        chosen.append(gradients)
        raise StateError("enough")

    monkeypatch.setattr("elasticflow.runtime.loop.join._joined", joined)
    with pytest.raises(StateError, match="enough"):
        elasticflow.join(virtual_shards=4, gradients=elasticflow.Gradients(on_nonfinite="skip"))
    assert chosen == [elasticflow.Gradients(virtual_shards=4, on_nonfinite="skip")]


@pytest.mark.parametrize("place", [sys, builtins])
@pytest.mark.parametrize(("status", "finishes"), [(1, False), ("no good", False), (0, True), (None, True)])
def test_a_script_that_fails_behind_its_loop_is_not_finished(
    monkeypatch: pytest.MonkeyPatch, place: Any, status: object, *, finishes: bool
) -> None:
    """It ends by its own exit code; one that ended well without `finish` has finished."""
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(module, name, getattr(module, name))
    loop = mock.MagicMock(_is_over=False, is_finished=True, exit_status=None)
    _note_exits(loop)
    with pytest.raises(SystemExit) as raised:
        place.exit(status)
    assert raised.value.code == status
    TrainingLoop.end_if_forgotten(loop)
    assert loop._end.called is finishes
    cast("Any", sys.exit).note_status(7)  # what the launcher calls
    assert loop.exit_status == 7
