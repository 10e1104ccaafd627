"""Carries out the lifecycle's commands: in the launch's store, in the run's files, with the agents of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from elasticflow import events
from elasticflow.errors import StorageError
from elasticflow.launcher.restarts.restart_ledger import CLAIMED_FAILURES
from elasticflow.launcher.supervisor.commands import (
    AddWorkers,
    AskWorkers,
    CheckDevices,
    ClaimFailed,
    ClaimGeneration,
    ClearSnapshot,
    ForgetAgent,
    FormGeneration,
    GenerationClaimed,
    ListSnapshots,
    RecordEvent,
    RecordFailure,
    ReleaseNode,
    RunTakenOver,
    SetSnapshotAside,
    SnapshotSetAside,
    SnapshotsListed,
    StartAgent,
    UpdateState,
)
from elasticflow.protocol.messages import Activity
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.supervisor.agent_channel import AgentChannel
    from elasticflow.launcher.supervisor.commands import Answer, Command
    from elasticflow.launcher.supervisor.launch_record import Launch
    from elasticflow.launcher.supervisor.local_agents import LocalAgents


class CommandRunner:
    """Carries out commands of *launch*, one by one; *agents*: those of this machine."""

    def __init__(self, launch: Launch, journal: Journal, channel: AgentChannel, agents: LocalAgents) -> None:
        self._launch, self._journal = launch, journal
        self._channel, self._agents = channel, agents

    def run(self, command: Command) -> Answer | None:  # noqa: C901, PLR0912  # one line for each command
        """Do *command*; return the event that answers it, if any.

        Raises:
            StoreLostError: the launch's store is gone.
            OSError: a file of the run cannot be written.
        """
        match command:
            case ClaimGeneration():
                return self._claim_generation(command)
            case ListSnapshots() | SetSnapshotAside() | ClearSnapshot():
                return self._snapshots(command)
            case FormGeneration():
                self._channel.form(command.generation, command.nodes, command.failed_at)
            case AskWorkers():
                self._channel.request(command.request, command.generation)
            case CheckDevices():
                self._channel.check_devices(command.nodes, command.generation)
            case ReleaseNode():
                self._channel.release(command.node)
            case StartAgent():
                self._agents.start_again(command.node)
            case ForgetAgent():
                self._agents.forget(command.node)
            case RecordEvent():
                self._journal.event(command.event, **command.fields)
            case UpdateState():
                self._journal.update(at_once=True, **command.fields)
            case AddWorkers():
                self._journal.add_workers(command.workers)
            case Activity():
                self._journal.activity(command)
            case RecordFailure():
                self._launch.ledger.append(command.entry)
            case _:
                assert_never(command)
        return None

    def _claim_generation(self, wanted: ClaimGeneration) -> Answer:
        """Claim the next generation at the snapshot URI, where no other launch can have it then.

        The claim holds the failures since the one this launch claimed last; the first one also those of the launch before.
        A supervisor that was stopped while another one took over the lead claims nothing: a first claim would succeed.
        """
        if self._launch.store.is_led_anew():
            return RunTakenOver()
        catalog, last = self._launch.catalog, wanted.last
        try:
            claim = {
                "run_id": self._launch.request.folder.run_id,
                "launch": self._launch.number,
                "reason": wanted.reason,
                "nodes": list(wanted.nodes),
                **ProcessRecord.of().to_json(),
                CLAIMED_FAILURES: self._launch.ledger.since(last or catalog.newest_generation()),
            }
            if last == 0:
                number = catalog.claim_generation(claim)
            elif catalog.claim_after(last, claim):
                number = last + 1
            else:
                return RunTakenOver()
        except OSError as error:
            return ClaimFailed(str(error))
        self._journal.generation = number
        return GenerationClaimed(number)

    def _snapshots(self, command: ListSnapshots | SetSnapshotAside | ClearSnapshot) -> Answer | None:
        """Ask the snapshots' store; one that does not answer lists none and changes none: the next start meets it again."""
        try:
            match command:
                case ListSnapshots():
                    return SnapshotsListed(
                        tuple(snapshot.name for snapshot in self._launch.catalog.committed())
                    )
                case SetSnapshotAside():
                    self._launch.catalog.quarantine(command.name, command.reason)
                case ClearSnapshot():
                    self._launch.catalog.lift(command.name)
                case _:
                    assert_never(command)
        except (OSError, StorageError):
            return SnapshotsListed(()) if isinstance(command, ListSnapshots) else None
        is_aside = isinstance(command, SetSnapshotAside)
        event = events.SNAPSHOT_REJECTED if is_aside else events.SNAPSHOT_CLEARED
        self._journal.event(event, name=command.name, reason=command.reason)
        return SnapshotSetAside(command.name) if is_aside else None
