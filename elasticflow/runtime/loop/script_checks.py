"""Checks of a loop written by hand, and messages to its author on standard error.

The train.py that the compiler writes needs no checks, and a supervisor follows its log.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.runtime.loop import carried_values, drift, script_state
from elasticflow.runtime.loop.loop_schedule import within
from elasticflow.runtime.loop.script_state import ScriptState, argument_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.loop.gradients import Gradients
    from elasticflow.runtime.loop.loop_schedule import LoopSchedule
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.snapshot.snapshots import Snapshots
    from elasticflow.runtime.state.state import State

OWN_LOOP_OVER = "the script's own loop is over"


class ScriptChecks:
    """Checks a script's state, its arguments and its `enumerate`. Every rank has one.

    Attributes:
        is_over: The run is finished: no step depends on what the script made behind the loop.
    """

    def __init__(self, worker: Worker, gradients: Gradients | None, ignored: tuple[str, ...]) -> None:
        self._worker, self._gradients, self._ignored = worker, gradients, ignored
        # A rank that is asked to exit takes part in steps until all ranks have agreed.
        worker.vote.may_skip = False
        self._looks_for_enumerate = worker.rank == 0
        self.is_over = False

    def begin(
        self,
        state: State,
        snapshots: Snapshots,
        schedule: LoopSchedule,
        passed: Mapping[str, Any],
        caller: FrameType,
        repeats_epochs: Callable[[], bool],
    ) -> None:
        """Continue where the restored snapshot ended, if there is one. Collective: every rank.

        From now on watch the state in variables of *caller*, which has given *passed* to `Run.keep`.

        Raises:
            LoopDriftError: an argument of `join` differs from the snapshot's.
        """
        snapshots.unsaved.add(
            ScriptState(state, caller, passed, self._ignored, self._tell_of_left_out, repeats_epochs).look
        )
        worker, settings = self._worker, drift.of_join(self._worker, self._gradients)
        snapshots.describe_loop(settings)
        if snapshots.restored is None:
            return
        before = {key: value for key, value in (snapshots.loop or {}).items() if not drift.is_of_batches(key)}
        drift.require_unchanged(worker, before, settings)
        snapshots.remember_restored()
        worker.agree_to_stop()
        worker.vote.stop_wanted = None
        if worker.stopped is not None and worker.stopped.reason == OWN_LOOP_OVER:
            worker.stopped, schedule.has_ended = None, True

    def compare_batches(self, snapshots: Snapshots, settings: Mapping[str, Any], *, is_resumed: bool) -> None:
        """Have snapshots record the arguments of the batches; where the run *is_resumed* in them, compare the arguments.

        Raises:
            LoopDriftError: an argument differs from the snapshot's.
        """
        snapshots.describe_loop(settings)
        before = {key: value for key, value in (snapshots.loop or {}).items() if drift.is_of_batches(key)}
        if is_resumed and before:
            drift.require_unchanged(self._worker, before, settings)

    def check_count(self, frame: FrameType, batch: Batch) -> None:
        """Warn at the first batch if *frame* counts batches by `enumerate`, and a step depends on the number or the run was restarted."""
        looks, self._looks_for_enumerate = self._looks_for_enumerate, False
        counted = carried_values.enumerated_at(frame) if looks else None
        if counted is None:
            return
        if 0 not in (batch.number, within(batch.end).step - 1):
            self.warn(
                f"enumerate(run.batches(...)) begins to count again, and this is batch {batch.number} of its epoch: a restart "
                "continued here; batch.number is right where a step depends on the number"
            )
        elif counted.is_learned_from:
            self.warn(
                f"a step depends on {counted.counter}, which counts the passes of the loop over run.batches: a restart in the middle "
                "of an epoch would begin to count again; batch.number, or batch.end.step, continues there"
            )

    def tell(self, text: str) -> None:
        """Write *text* to standard error on rank 0, where no supervisor follows the log."""
        if self._worker.rank == 0 and self._worker.identity.started_by != "launcher":
            sys.stderr.write(f"elasticflow: {text}\n")
            sys.stderr.flush()

    def warn(self, text: str) -> None:
        """Warn on rank 0: in the log and on a supervisor's console, and as `tell` does."""
        if self._worker.rank == 0:
            warnings.warn(text, stacklevel=5)
        self.tell(text)

    def _tell_of_left_out(self, name: str, kind: str) -> None:
        if self._worker.rank == 0 and not self.is_over:
            remedy = f"{_remedy_for(name, kind)} if a step, or a file of the script, depends on it"
            self._worker.event(events.STATE_LEFT_OUT, name=name, type=kind, help=remedy)
            self.tell(f"no snapshot holds {name}, a {kind}: {remedy}")


def _remedy_for(name: str, kind: str) -> str:
    """Return the change of a script by which a restart continues with the object at *name*."""
    argument = f"run.keep({argument_for(name)}={name})"
    match kind:
        case script_state.COUNTER:
            return f"{argument}, and set it from run.kept, or keep its object, with a state_dict and a load_state_dict,"
        case script_state.DECIDER:
            return f"{argument}, with a state_dict and a load_state_dict,"
        case script_state.POOL | script_state.BUFFER | script_state.RUNNING | script_state.AVERAGE:
            return (
                f"{argument}, a list or dict, or its object with a state_dict (arrays by torch.from_numpy),"
            )
        case script_state.SEQUENCE:
            return "a restart begins it anew; take the item at run.position.step,"
        case script_state.CARRIED:
            return (
                f"a restart makes it anew before the loop; make it within each pass, or {argument}, a list, or a tensor that each "
                f"pass fills by {name}.copy_(...) (torch.from_numpy shares an array's memory),"
            )
        case script_state.READER | script_state.GENERATOR:
            return (
                "a restart begins it anew; draw its samples within each pass, data[torch.randint(len(data), (16,))], or have one "
                "dataset for run.batches return samples of both,"
            )
        case _:
            return argument
