"""Tries a restart for `--deep`: finds state that the next step would lack if the process had died before it.

The state after one step is captured, and another step is trained. Then everything is built anew, gets the
captured state, and trains the same step. Weights that differ then were lost, and so was any differing value
that optimizer, schedule or included objects refer to. A cache that is filled again does not differ; a value
that differs between two such restarts (a clock) is no state.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from torch import Tensor

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.child.run import DeepRun
from elasticflow.deep.child.state import build, included, key_of, state_of
from elasticflow.errors import StateError, StopTraining
from elasticflow.runtime.process import random_streams, reachable
from elasticflow.runtime.snapshot import unsaved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.deep.child.entry_point import EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.deep.child.state import Trained
    from elasticflow.runtime.snapshot.unsaved import Mark
    from elasticflow.runtime.state.state import State

Saved = tuple[Any, dict[str, Tensor], dict[str, str]]
"""JSON, tensors by key, and the layout of tensors that are not contiguous."""
Marks = tuple[dict[str, "Mark"], dict[str, "Mark"]]
"""Marks of all leaves by path, before and after a step."""

_MODEL = "model."
_INCLUDE = "include."


def check(report: Report, code: EntryPoint, trained: Trained, batch: Any) -> None:
    """Report state that a restart would lose, found by a step on the same batch each time."""
    report.doing("resuming after a restart", "optimizer.entry")
    include = included(code)
    state = _state_of(trained, include)
    quiet = report.quietly()

    def step(trained: Trained) -> None:
        DeepRun(quiet, code, trained).train(copy.deepcopy(batch))

    try:
        saved = _saved(state)
    except StateError:
        return  # `state.count` reports it
    try:
        expected = _around_a_step(state, code, trained, step)
        restarted = _restarted(quiet, code, saved, include, step)
        lost = _lost(expected, restarted, code.ignored)
        if any(not path.startswith(_INCLUDE) for path in lost):
            again = _restarted(quiet, code, saved, include, step)
            lost = [
                path
                for path in lost
                if path.startswith(_INCLUDE) or restarted[1].get(path) == again[1].get(path)
            ]
    except (BrokenError, StopTraining):
        return
    except StateError as error:
        report.problem("state", key_of(error.message), error)
        return
    except Exception as error:  # noqa: BLE001  # the job's own code, or too little memory for a second model
        report.note(f"a restart could not be tried: {type(error).__name__}: {error}")
        return
    # A value that was the same before that step and differs after it depends on other state that was lost.
    hidden = [path for path in lost if expected[0].get(path) != restarted[0].get(path)]
    weights = [path for path in lost if path.startswith(_MODEL)]
    if hidden:
        report.problem("restart", key_of(hidden[0]), unsaved.refusal(hidden))
    elif weights:
        report.problem("restart", "model.entry", _other_weights(weights[0]))


def _saved(state: State) -> Saved:
    captured = state.capture()
    tensors = {key: tensor.detach().clone() for key, tensor in captured.tensors.items()}
    return json.loads(json.dumps(captured.tree)), tensors, dict(captured.memory_formats)


def _state_of(trained: Trained, include: dict[str, Any]) -> State:
    """Return the state that a restart continues with, except torch's GradScaler: these runs all begin with a scale of 1."""
    return state_of(trained._replace(scaler=None), include)


def _restarted(
    quiet: Report,
    code: EntryPoint,
    saved: Saved,
    include: dict[str, Any],
    step: Callable[[Trained], None],
) -> Marks:
    random_streams.seed_all(code.seed)
    trained = build(quiet, code)
    trained.model.train()
    state = _state_of(trained, include)
    state.apply(copy.deepcopy(saved[0]), {key: t.clone() for key, t in saved[1].items()}, saved[2])
    return _around_a_step(state, code, trained, step)


def _around_a_step(
    state: State, code: EntryPoint, trained: Trained, step: Callable[[Trained], None]
) -> Marks:
    """Train another step; return the marks before and after it."""
    before = _marks(state)
    random_streams.seed_all(code.seed + 1)
    step(trained)
    return before, _marks(state)


def _marks(state: State) -> dict[str, Mark]:
    model = state.model
    names, outside = unsaved.names_of(model), unsaved.outside_of(model)
    leaves = list(reachable.leaves(unsaved.roots_of(state), names, outside))
    leaves += [reachable.Leaf(f"{_MODEL}{name}", p.detach()) for name, p in model.named_parameters()]
    return unsaved.marks_of([leaf for leaf in leaves if not unsaved.is_scratch(leaf.path)])


def _lost(expected: Marks, restarted: Marks, ignored: Sequence[str]) -> list[str]:
    return [
        path
        for path, mark in expected[1].items()
        if restarted[1].get(path) != mark
        and not unsaved.is_ignored(path, ignored)
        # A number of an included object may come from a clock: it is the same object both times.
        and not (path.startswith(_INCLUDE) and mark[0] == "number")
    ]


def _other_weights(path: str) -> StateError:
    name = path.removeprefix(_MODEL)
    return StateError(
        f"the first step after a restart would give {name} other values: model or step depend on something that no snapshot holds",
        "keep it in a buffer of the model, or in an object named in snapshots.include",
    )
