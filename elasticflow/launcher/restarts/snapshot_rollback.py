"""Decides whether a snapshot is to blame for failed starts; pure: the caller sets it aside, or clears it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.run_folder import step_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.launcher.restarts.restart_policy import FailedAttempt, RetryAdvice

_STARTS = 2


@dataclass(frozen=True)
class Suspect:
    """A snapshot that two starts failed from."""

    name: str
    step: int
    fingerprint: str
    reason: str


class Cleared(NamedTuple):
    """A snapshot that is good again, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Judgement:
    """Conclusions from a failure about the run's snapshots.

    Attributes:
        advice: `retry`: the snapshot may be what is wrong. `hopeless`: the same exception came from an older one as
            well. `unknown`: snapshots say nothing about another try.
        cleared: Snapshots that were set aside and are not to blame.
        suspect: To be set aside, should the launch continue.
    """

    rollback: SnapshotRollback
    advice: RetryAdvice = "unknown"
    cleared: tuple[Cleared, ...] = ()
    suspect: Suspect | None = None


@dataclass(frozen=True)
class SnapshotRollback:
    """Snapshots whose restores finished no step, and snapshots set aside for that.

    A snapshot is set aside after two starts in a row from it that failed before a step, in a way that its content can
    cause, if an older snapshot is there to resume from. Should a start from the older one fail with the same error, or the launch
    fail before the run has passed the snapshot's step without it, then it was not to blame and is good again: whoever
    mends the cause resumes from the newest snapshot. Ends that say nothing about it (a killed worker, a preemption, an
    outage) neither count nor put an end to the row.

    Attributes:
        restored_from: The snapshot from which the last starts failed; None if the last one finished a step.
        failed_starts: How many of them failed in a row.
        set_aside: The snapshots set aside, neither proved to blame nor cleared.
        cleared: Names of those that were; they are not suspected again.
    """

    restored_from: str | None = None
    failed_starts: int = 0
    set_aside: tuple[Suspect, ...] = ()
    cleared: frozenset[str] = frozenset()

    def needs_snapshots(self, failed: FailedAttempt) -> bool:
        """Return whether `judge` has to know the run's snapshots."""
        return failed.step is None and _may_be_to_blame(self, failed) and not _failed_alike(self, failed)

    def judge(self, failed: FailedAttempt, snapshots: Sequence[str] = ()) -> Judgement:
        """Return the conclusions from *failed* about snapshots.

        Args:
            failed: A generation that failed, or could not be formed.
            snapshots: Names of the run's snapshots that could be restored, newest first; needed where
                `needs_snapshots` says so. None if the store does not answer: nothing is suspected then.
        """
        known = self
        if failed.step is not None:  # it got somewhere, and without those whose step it has passed
            still_open = tuple(suspect for suspect in self.set_aside if suspect.step >= failed.step)
            known = replace(self, restored_from=None, failed_starts=0, set_aside=still_open)
        if not failed.can_come_from_snapshot:
            return Judgement(known)
        if alike := _failed_alike(known, failed):
            reason = f"a start from an older one ended in the same way: {failed.error}"
            return Judgement(
                _without(known, alike),
                "unknown" if failed.failure_class == "crash" else "hopeless",
                tuple(Cleared(suspect.name, reason) for suspect in alike),
            )
        name = failed.restored_from
        if name is None or failed.step is not None or not _may_be_to_blame(known, failed):
            return Judgement(known)
        count = known.failed_starts + 1 if name == known.restored_from else 1
        known = replace(known, restored_from=name, failed_starts=count)
        if not snapshots or snapshots[-1] == name:
            return Judgement(known)
        if count < _STARTS:
            return Judgement(known, "retry")
        cause = f"{failed.failure_class}: {failed.error}"
        reason = f"two starts from it failed before a step was finished: {cause}"
        return Judgement(known, "retry", suspect=Suspect(name, step_of(name), failed.fingerprint, reason))

    def with_set_aside(self, suspect: Suspect) -> SnapshotRollback:
        """Return the state once *suspect* was set aside."""
        return replace(self, set_aside=(*self.set_aside, suspect))

    def given_up(self) -> Judgement:
        """Return the judgement of a launch that fails: nothing is proved against any snapshot that is set aside."""
        reason = "the launch failed without it as well"
        cleared = tuple(Cleared(suspect.name, reason) for suspect in self.set_aside)
        return Judgement(_without(self, self.set_aside), cleared=cleared)


def _may_be_to_blame(known: SnapshotRollback, failed: FailedAttempt) -> bool:
    """Return whether the snapshot that *failed* resumed from can be the cause, and is not cleared."""
    name = failed.restored_from
    return failed.can_come_from_snapshot and name is not None and name not in known.cleared


def _failed_alike(known: SnapshotRollback, failed: FailedAttempt) -> tuple[Suspect, ...]:
    return tuple(suspect for suspect in known.set_aside if suspect.fingerprint == failed.fingerprint)


def _without(known: SnapshotRollback, suspects: Sequence[Suspect]) -> SnapshotRollback:
    still_open = tuple(suspect for suspect in known.set_aside if suspect not in suspects)
    return replace(
        known, set_aside=still_open, cleared=known.cleared | {suspect.name for suspect in suspects}
    )
