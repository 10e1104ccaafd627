"""The classes in which a generation's end is reported and counted: failures, one row each, and outcomes that are no failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

FailureClass = Literal[
    "user_error",
    "oom",
    "device",
    "hang",
    "crash",
    "nonfinite",
    "diverged",
    "storage",
    "snapshot_corrupt",
    "node_lost",
    "agent_lost",
    "peer",
]
Outcome = Literal["finished", "drained", "resized", "preempted"]
"""How a generation ends that did not fail. All but `finished` lead to another one, free of charge and at once."""

OUTCOMES: frozenset[str] = frozenset(get_args(Outcome))

Repeat = Literal["same error", "same step"]
"""A repetition without progress: an error with the same fingerprint, or the same class at the same step."""

BlamesSnapshot = Literal["never", "always", "if it faulted"]
"""If the restored snapshot can be the cause; "faulted": the process died of a signal that it caused itself."""


@dataclass(frozen=True)
class FailureRow:
    """Consequences of a failure of one class.

    Attributes:
        free_times: Failures in a row, without progress in between, that cost nothing; the next one is charged.
        final_before_first_step: Another try is hopeless if no step was finished.
        final_repeat: Another try is hopeless after this repetition; None: the budget alone decides.
        repeat_reason: The reason why another try is hopeless, in words for the verdict.
        blames_snapshot: The snapshot that the generation resumed from can be the cause.
        excuses_drift: The job's own code is expected to differ when the run continues.
        counted_as: The class under which the budget counts it; None: its own.
    """

    free_times: int = 0
    final_before_first_step: bool = False
    final_repeat: Repeat | None = None
    repeat_reason: str = ""
    blames_snapshot: BlamesSnapshot = "never"
    excuses_drift: bool = False
    counted_as: FailureClass | None = None


SAME_ERROR_AGAIN = "the same error came again without progress"

FAILURES: Mapping[str, FailureRow] = {
    "user_error": FailureRow(
        final_before_first_step=True,
        final_repeat="same error",
        repeat_reason=SAME_ERROR_AGAIN,
        blames_snapshot="always",
        excuses_drift=True,
    ),
    "oom": FailureRow(),
    # A device that fails may work after its reset, or be left out: the budget decides, however often it fails.
    "device": FailureRow(),
    "hang": FailureRow(),
    "crash": FailureRow(blames_snapshot="if it faulted"),
    # Training is deterministic: the second time at one step proves that it would fail there each time.
    "nonfinite": FailureRow(
        final_repeat="same step",
        repeat_reason="the loss was not finite at the same step again",
        blames_snapshot="always",
    ),
    "diverged": FailureRow(
        final_repeat="same error",
        repeat_reason="the replicas went apart in the same way again, without progress",
    ),
    "storage": FailureRow(),
    "snapshot_corrupt": FailureRow(),
    "node_lost": FailureRow(),
    # A single dead agent may be an accident; an agent that dies again and again without a finished step is not.
    "agent_lost": FailureRow(free_times=3),
    # A worker whose peer is gone, if the reason for that is unknown.
    "peer": FailureRow(counted_as="crash"),
}

CLASSES: frozenset[str] = frozenset(FAILURES) | OUTCOMES - {"finished"}
"""The classes that the ledger may hold: a worker may have left, or been killed, on the way to an outcome."""
