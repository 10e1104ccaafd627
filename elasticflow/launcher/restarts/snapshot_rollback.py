"""Whether a snapshot is to blame for starts that fail: it is set aside, or cleared again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.errors import StorageError
from elasticflow.launcher.restarts.failure_classes import FAILURES
from elasticflow.run_folder import step_of
from elasticflow.system.processes import FAULTS

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.failures import Failure
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.restarts.restart_policy import RetryAdvice
    from elasticflow.snapshots.store.catalog import Catalog

_STARTS = 2


@dataclass(frozen=True)
class _Case:
    """A snapshot that two starts failed from, its step, and how."""

    name: str
    step: int
    fingerprint: str
    reason: str


class SnapshotRollback:
    """Follows which snapshot each generation was restored from, and how those ended that finished no step.

    Two starts in a row from the same snapshot that failed so, in a way that its content can cause, set it aside if
    there is an older one to go on from. Should a start from that one fail with the same error, or the launch fail
    before the run has passed the snapshot's step without it, then it was not to blame and is good again: whoever
    mends the cause goes on from the newest snapshot. Ends that say nothing about it (a killed worker, a preemption, an
    outage) neither count nor put an end to the row.
    """

    def __init__(self, catalog: Catalog, journal: Journal) -> None:
        self._catalog, self._journal = catalog, journal
        self._suspect: str | None = None
        self._failed_starts = 0
        self._next: _Case | None = None  # to be set aside if the launch goes on
        self._open: dict[str, _Case] = {}  # set aside, and not proved guilty yet
        self._cleared: set[str] = set()

    def retry_advice(self, generation: Generation, failure: Failure | None) -> RetryAdvice:
        """Return what the run's snapshots say about another try.

        `retry`: the snapshot may be what is wrong. `hopeless`: the same exception came from an older one as well.
        """
        self._next = None
        if generation.step is not None:
            self._suspect, self._failed_starts = None, 0
            for case in [case for case in self._open.values() if case.step < generation.step]:
                del self._open[case.name]
        if failure is None or not _can_be_caused_by_content(failure):
            return "unknown"
        not_alone = [case for case in self._open.values() if case.fingerprint == failure.fingerprint]
        for case in not_alone:
            self._clear(case, f"a start from an older one ended in the same way: {failure.error}")
        if not_alone:
            return "unknown" if failure.failure_class == "crash" else "hopeless"
        name = generation.restored_from
        if name is None or generation.step is not None or name in self._cleared:
            return "unknown"
        self._failed_starts = self._failed_starts + 1 if name == self._suspect else 1
        self._suspect = name
        if not self._has_older(name):
            return "unknown"
        if self._failed_starts >= _STARTS:
            cause = f"{failure.failure_class}: {failure.error}"
            reason = f"two starts from it failed before a step was finished: {cause}"
            self._next = _Case(name, step_of(name), failure.fingerprint, reason)
        return "retry"

    def conclude(self, *, goes_on: bool) -> None:
        """Set the snapshot aside whose turn it is if another generation follows; else clear all that is not proved."""
        case, self._next = self._next, None
        if not goes_on:
            for each in list(self._open.values()):
                self._clear(each, "the launch failed without it as well")
        elif case is not None:
            try:
                self._catalog.quarantine(case.name, case.reason)
            except (OSError, StorageError):
                return  # the next start meets it again
            self._open[case.name] = case
            self._journal.event(events.SNAPSHOT_REJECTED, name=case.name, reason=case.reason)

    def _clear(self, case: _Case, reason: str) -> None:
        del self._open[case.name]
        self._cleared.add(case.name)
        try:
            self._catalog.lift(case.name)
        except (OSError, StorageError):
            return
        self._journal.event(events.SNAPSHOT_CLEARED, name=case.name, reason=reason)

    def _has_older(self, name: str) -> bool:
        try:
            newest_first = [found.name for found in self._catalog.committed()]
        except (OSError, StorageError):
            return False
        return newest_first[-1:] not in ([], [name])


def _can_be_caused_by_content(failure: Failure) -> bool:
    match FAILURES[failure.failure_class].blames_snapshot:
        case "never":
            return False
        case "always":
            return True
        case "if it faulted":
            return failure.exit_code is not None and -failure.exit_code in FAULTS
