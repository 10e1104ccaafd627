"""Taking part in a launch that another machine supervises: `run JOB --join HOST:PORT`."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticflow.compiler.launch_folder import job_record
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.origins import JOB_JSON, Made, origins_now
from elasticflow.errors import (
    ANSWER_IS_NO,
    BUDGET_SPENT,
    INTERRUPTED,
    KILLED_BY_USER,
    LaunchNotFoundError,
    LedElsewhereError,
    NodeRefusedError,
    RendezvousError,
    RunLockedError,
    TokenRefusedError,
)
from elasticflow.launcher.agent.agent_process import AgentEnd, build_agent_process
from elasticflow.launcher.agent.waiting_agent import next_launch_id
from elasticflow.launcher.launch import check_file_sizes, check_torch, snapshots_of
from elasticflow.launcher.rendezvous import network
from elasticflow.launcher.rendezvous.invitation import Invitation
from elasticflow.launcher.rendezvous.leadership import (
    NAME_REMEDY,
    connect,
    has_later_launch,
    newest_launch,
    store_address_of,
)
from elasticflow.launcher.rendezvous.liveness import SupervisorWatch
from elasticflow.launcher.rendezvous.store_keys import CANCELLED, EXIT_CODE, INVITATION, LAUNCH, NOTICED
from elasticflow.launcher.rendezvous.supervisor_channel import Outbox
from elasticflow.launcher.rendezvous.token import given_token
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests
from elasticflow.protocol import control_store
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.messages import AgentDied
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.run_folder import RunFolder, make_runs_folder
from elasticflow.system import atomic_files, records
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.launcher.supervisor.launch_record import Request
    from elasticflow.protocol.control_store import ControlStore, RemoteControlStore
    from elasticflow.protocol.store_address import StoreAddress
    from elasticflow.snapshots.store.catalog import Catalog


_CONNECT_S = 60.0
_AGAIN_S = 1.0
MOST_LOCKED = 10
"""Tries to lead a run whose lock another process has; each waits a minute for that process' launch."""
# A machine that is cut off has to know that before others have done without it for long.
_ANSWER_S = 10.0
# A network's file system shows a new file after a moment, and what was put in place of another one after a minute at most.
_SEEN_S, _SEEN_ANEW_S = 5.0, 65.0

_POLL_S = 0.05
# An agent that ends so many times in a row by its own doing or for memory, each time so soon after its start, will not do better.
_MOST_STARTS = 5
_SOON_S = 60.0
# An agent that still imports ignores the request to leave: it is asked again.
_ASK_S = 0.2
# A machine that is cut off tries for so long to reach the launch again.
_BACK_S = 60.0


def join(
    request: Request,
    address: StoreAddress,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    lead: Callable[[Request], int],
) -> int:
    """Take part in the launch at *address* until it is over or this machine is asked to leave; return the exit code.

    If its supervisor goes silent while the store lives on, this process leads the next launch of the run, unless
    another one is first, in whose launch it takes part then.

    Args:
        request: The job as this machine has it; its run folder is not used.
        address: Host and port from `--join`.
        warn: Called with each sentence that a person should read before this machine takes part.
        lead: Makes the launch that it is given, and returns its exit code.

    Raises:
        LaunchNotFoundError: no one leads a run of the job at *address*.
        RunLockedError: the leader is gone, and its lock is still held after ten minutes.
        NodeRefusedError: this machine would train something else, or does not see the run's snapshots.
        StorageError: this machine cannot write at the snapshot URI.
        InterfaceError: this machine has no such interface as the job names.
        TokenError: this machine's token cannot be had.
        TokenRefusedError: this machine's token is not the launch's.
    """
    plan, store_address = plan_to_join(request, address, warn)
    await_server(address, say)
    keys = connect(store_address)
    last = locked = 0
    folder = request.folder
    while True:
        try:
            number = await_launch(keys, store_address, last, say, is_patient=not last or locked > 0)
            node = Node(request, plan, store_address.under(str(number)), say)
        except StoreLostError as error:
            raise LaunchNotFoundError(
                str(error), "start the run again, or what serves its rendezvous"
            ) from error
        except LaunchNotFoundError:
            # The machine that took over was lost, too; a network's file system keeps its lock for a while.
            if not last:
                raise
        else:
            code = node.take_part()
            if code is not None:
                return code
            say(
                "the process that led the run is gone: the run resumes from here, unless another machine is first"
            )
            last, locked, folder = number, 0, node.folder
        try:
            request = replace(request, folder=folder, accept_drift=False)
            return lead_unless_led(request, lead, store_address, last)
        except LedElsewhereError:
            locked = 0
        except RunLockedError:  # the lock comes before the lead
            locked += 1
            if locked > MOST_LOCKED:
                raise


def plan_to_join(
    request: Request, address: StoreAddress, warn: Callable[[str], None]
) -> tuple[LaunchPlan, StoreAddress]:
    """Return what this machine would train, and the address of the job's keys in the store at *address*.

    Raises:
        NodeRefusedError: a static rendezvous does not know this machine's rank.
        StorageError: this machine's files may not have a megabyte.
        InterfaceError: this machine has no such interface as the job names.
        TokenError: this machine's token cannot be had.
    """
    check_torch(warn)
    check_file_sizes(warn)
    plan = plan_job(request.job, project_root=request.project_root, job_files=request.files)
    check_rank(plan, request.node_rank)
    network.check(plan.interface)
    token = given_token(plan.token_file, request.project_root)
    return plan, store_address_of(plan, address.host, address.port, token)


def check_rank(plan: LaunchPlan, node_rank: int | None) -> None:
    """Check that a static rendezvous knows this machine's rank.

    Raises:
        NodeRefusedError: no rank is given, or a rank that the job does not have.
    """
    if plan.rdzv_backend != "static":
        return
    if node_rank is None:
        raise NodeRefusedError(
            'torchrun.rdzv_backend is "static", and this machine is not told its rank',
            "give it --node-rank, or the variable NODE_RANK: 0 is the first machine",
        )
    if node_rank >= plan.nodes_max:
        raise NodeRefusedError(
            f"node rank {node_rank} is none of the job's {plan.nodes_max} nodes", "ranks are counted from 0"
        )


def why_not_served(address: StoreAddress) -> OSError | None:
    """Return why no one answers at *address*; None if someone does."""
    try:
        socket.create_connection((address.host, address.port), timeout=5).close()
    except OSError as error:
        return error
    return None


def await_server(address: StoreAddress, say: Callable[[str], None]) -> None:
    """Return once someone answers at *address*; a supervisor that is still starting is waited for.

    Raises:
        LaunchNotFoundError: no one answers in time.
    """
    refusal: OSError | None = None
    for _ in attempts(_CONNECT_S, _AGAIN_S):
        error = why_not_served(address)
        if error is None:
            return
        if refusal is None:
            say(f"waiting for {address.endpoint}: {error}")
        refusal = error
    if isinstance(refusal, socket.gaierror):
        message = f"--join: {address.host} does not resolve: {refusal.strerror}"
        raise LaunchNotFoundError(message, NAME_REMEDY) from refusal
    raise LaunchNotFoundError(
        f"nobody serves a launch at {address.endpoint}: {refusal}",
        "start the run on that machine first, with nodes.endpoint naming it, and open the port",
    ) from refusal


def await_launch(
    keys: ControlStore,
    store_address: StoreAddress,
    last: int,
    say: Callable[[str], None],
    *,
    is_patient: bool = True,
) -> int:
    """Return the number of the job's newest launch, later than *last* or led again, that is not over.

    Args:
        store_address: Address of *keys*.
        last: Number of a launch whose leader gave no sign of life; 0: none. It may have been cut off for a while.
        is_patient: False: this machine can lead, so a process that claimed a later launch and died is not waited for.

    Raises:
        LaunchNotFoundError: there is no such launch in time.
    """
    what = f"a run of this job at {store_address.endpoint}"
    watch = SupervisorWatch(control_store.connect(store_address.under(str(last)))) if last else None
    claimed = last
    claimer: SupervisorWatch | None = None
    for attempt, _ in enumerate(attempts(_CONNECT_S, _AGAIN_S / 2)):
        number = newest_launch(keys)
        if watch is not None:
            watch.look()
        if (number > last or (watch is not None and watch.has_changed)) and _is_led(store_address, number):
            return number
        if number > claimed:
            claimed, claimer = (
                number,
                SupervisorWatch(control_store.connect(store_address.under(str(number)))),
            )
        if not is_patient and claimer is not None and claimer.look():
            break
        if attempt == 0:
            say(f"waiting for {what}")
    raise LaunchNotFoundError(f"nobody leads {what}", "start it first: elasticflow run JOB")


def lead_unless_led(
    request: Request, lead: Callable[[Request], int], store_address: StoreAddress, last: int = 0
) -> int:
    """Lead the run of *request*; return the exit code of the launch, or of a later one that has taken it over and is over, too.

    Args:
        last: Number of a launch whose leader gave no sign of life, and may have ended the run since; 0: none.

    Raises:
        LedElsewhereError: another process led the run at the start, or leads it by now: this machine was cut off.
        ElasticflowError: the launch cannot begin (`launch.prepare`).
    """
    if last and (told := _code_told_late(store_address, last)) is not None:
        return told
    code = lead(request)
    if code in (ANSWER_IS_NO, BUDGET_SPENT):
        with contextlib.suppress(RendezvousError, StoreLostError):
            number = newest_launch(connect(store_address))
            newest = control_store.connect(store_address.under(str(number)))
            # The launch that this process led is over. The leader of a later one may not have invited anyone yet.
            if not newest.check([EXIT_CODE]):
                raise LedElsewhereError("another process leads the run by now")
            return int(newest.get(EXIT_CODE))
    return code


def _code_told_late(store_address: StoreAddress, number: int) -> int | None:
    """Return the exit code of launch *number*, the newest, if its leader has ended it; None if the run continues."""
    with contextlib.suppress(RendezvousError, StoreLostError):
        launch = control_store.connect(store_address.under(str(number)))
        if newest_launch(connect(store_address)) == number and launch.check([EXIT_CODE]):
            code = int(launch.get(EXIT_CODE))
            return code if code != INTERRUPTED or launch.check([CANCELLED]) else None
    return None


def _is_led(store_address: StoreAddress, number: int) -> bool:
    """Return whether the launch *number* at *store_address* has begun and is not over."""
    launch = control_store.connect(store_address.under(str(number)))
    return launch.check([INVITATION]) and not launch.check([EXIT_CODE])


def check_shared(catalog: Catalog, invitation: Invitation, say: Callable[[str], None]) -> None:
    """Check that this machine sees at the snapshot URI what the machine that leads has written there for this launch.

    A folder that each machine has for itself may hold a copy of the run's files: what is looked for is new in each launch.

    Raises:
        NodeRefusedError: it does not, even after a wait: a network file system may show files late.
        OSError: the store does not answer.
    """
    run_id, where = invitation.run_id, catalog.storage.uri
    what, began = "", time.monotonic()
    for attempt, _ in enumerate(attempts(_SEEN_ANEW_S, _AGAIN_S)):
        if catalog.has_launch(invitation.launch_id):
            return
        record = catalog.read_job_record()
        if record is not None and record.get("run_id") == run_id:
            what = f"in {where} it reads what another launch has written, as in a copy that this machine has for itself"
        else:
            what = f"nothing of it lies in {where}"
            if time.monotonic() > began + _SEEN_S:
                break
        if attempt == 0:
            say(f"looking in {where} for what the machine that leads has written there")
    raise NodeRefusedError(
        f"snapshots.uri: this machine does not see the snapshots of run {run_id}: {what}",
        "set snapshots.uri to a place that all machines see, such as s3://bucket/prefix or a shared folder",
    )


def store_of_node(store_address: StoreAddress) -> RemoteControlStore:
    """Return the launch's keys for a machine that takes part: what it looks at all the time is sent to it."""
    return control_store.connect(store_address, LAUNCH, answer_s=_ANSWER_S)


def _reached_again(store_address: StoreAddress, launch_id: str) -> ControlStore | None:
    """Return a client of the store of the launch *launch_id*; None if it is gone for good."""
    refusal = why_not_served(store_address)
    if isinstance(refusal, ConnectionRefusedError):
        return None
    if refusal is not None:
        raise StoreLostError(str(refusal)) from refusal
    try:
        store = store_of_node(store_address)
    except TokenRefusedError:  # another run's launch has the port
        return None
    if not store.check([INVITATION]):
        return None
    invitation = from_json(Invitation, json.loads(store.get(INVITATION)))
    return store if invitation.launch_id == launch_id else None


class JoinedNode:
    """This machine's part in the launch: its agent, and the signals that end it.

    Args:
        store: The launch's keys; the server sends those below `LAUNCH`.
        reconnect: Returns another client of the store if the launch can be reached again, None if it is gone for good.
            Raises StoreLostError while neither is known.
        is_store_outside: The store outlives the supervisor, which has to be watched then.
    """

    def __init__(
        self,
        node: str,
        agent: AgentProcess,
        store: ControlStore,
        say: Callable[[str], None],
        reconnect: Callable[[], ControlStore | None] = lambda: None,
        *,
        is_store_outside: bool = True,
    ) -> None:
        self._node, self._agent, self._store, self._say = node, agent, store, say
        self._reconnect, self._is_store_outside = reconnect, is_store_outside
        self._outbox = Outbox(store)
        self._supervisor = self._watch()
        self._final: int | None = None
        self._is_cancelled = False
        self._asked = LeaveRequests()
        self._started_at, self._soon_ended = 0.0, 0
        self._next_try = 0.0
        self._next_request = -math.inf

    @property
    def was_asked(self) -> bool:
        """True if a signal has asked this machine to exit, or the run was cancelled."""
        return self._is_cancelled or bool(self._asked.numbers)

    def take_part(self) -> int | None:
        """Return the exit code once the agent has left for good, None once the launch's supervisor is silent.

        Nothing that it started lives afterwards.
        """
        previous = self._asked.listen()
        self._supervisor = self._watch()
        try:
            self._start()
            while True:
                time.sleep(_POLL_S)
                if len(self._asked.numbers) > 1:
                    return KILLED_BY_USER
                if self._asked.numbers:
                    self._ask_agent_to_leave(time.monotonic())
                self._look_for_end()
                # The machine that leads counts this node as lost, and cannot reach its agent.
                self._agent.end_if_stopped()
                code = self._agent.exit_code()
                if code is not None and (final := self._ended(code)) is not None:
                    return final
                # A supervisor that has told the exit code is silent while the agent's writer finishes here.
                if self._final is None and self._is_silent():
                    # No supervisor is left to let this node go.
                    return INTERRUPTED if self._asked.numbers else None
        finally:
            self._agent.end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask_agent_to_leave(self, now: float) -> None:
        if now < self._next_request:
            return
        if self._next_request < 0:
            self._say("asked to leave: the workers leave after their step")
        self._next_request = now + _ASK_S
        self._agent.send(signal.SIGUSR1)

    def _watch(self) -> SupervisorWatch | None:
        """Return the watch of the supervisor; a supervisor that serves the store gives no sign of life: the connection's end is its own."""
        return SupervisorWatch(self._store) if self._is_store_outside else None

    def _is_silent(self) -> bool:
        try:
            return self._supervisor is not None and self._supervisor.look()
        except RuntimeError:  # the agent sees it, too, and ends
            return False

    def _look_for_end(self) -> None:
        """Note the launch's exit code as soon as it is there: its store may go soon after."""
        if self._final is not None:
            return
        try:
            if self._store.check([EXIT_CODE]):
                code = int(self._store.get(EXIT_CODE))
                self._is_cancelled = self._store.check([CANCELLED])
                self._final = code
                self._store.add(NOTICED, 1)
        except RuntimeError:  # the agent sees it, too, and ends
            if time.monotonic() > self._next_try:
                self._connect_again()

    def _ended(self, code: int) -> int | None:
        """Return this process' exit code now that the agent has ended; None if it was started again."""
        if self._final is not None:
            return self._final
        end = AgentEnd(code, is_for_memory=self._agent.is_killed_for_memory())
        try:
            if self._asked.numbers:
                return INTERRUPTED
            self._tell_of_end(end)
        except RuntimeError as error:
            self._say(f"the launch is gone: {error}")
            return INTERRUPTED
        counts = end.is_its_own_doing and time.monotonic() < self._started_at + _SOON_S
        self._soon_ended = self._soon_ended + 1 if counts else 0
        if self._soon_ended >= _MOST_STARTS:
            self._say(
                f"the agent ended {self._soon_ended} times in a row: this machine takes no part any more"
            )
            self._say(self._agent.last_words())
            return ANSWER_IS_NO
        self._say(f"the agent ended with code {code}, and is started again")
        self._start()
        return None

    def _tell_of_end(self, end: AgentEnd) -> None:
        """Tell the supervisor that the agent has ended; a machine that was cut off does so once it is back.

        Raises:
            StoreLostError: the launch is gone, or does not come back.
        """
        message = AgentDied(self._node, f"its agent {end.cause}", end.failure_class)
        has_told = False
        for _ in attempts(_BACK_S, _AGAIN_S):
            try:
                self._outbox.post(message)
            except StoreLostError as error:
                if not has_told:
                    self._say(f"cut off from the launch: {error}")
                has_told = True
                if self._asked.numbers or not self._connect_again():
                    raise
            else:
                return
        self._outbox.post(message)

    def _connect_again(self) -> bool:
        """Try to reach the launch by another connection; return false if it is gone for good.

        One that was cut for long comes back late, by TCP's own rules.
        """
        self._next_try = time.monotonic() + _AGAIN_S
        with contextlib.suppress(StoreLostError):
            if (store := self._reconnect()) is None:
                return False
            self._store, self._outbox = store, Outbox(store)
            self._supervisor = self._watch()
        return True

    def _start(self) -> None:
        self._agent.start()
        self._started_at = time.monotonic()


class Node(JoinedNode):
    """This machine as a node of the launch whose keys are at *store_address*.

    Raises:
        NodeRefusedError: this machine would train something else, or does not see the run's snapshots.
    """

    def __init__(
        self, request: Request, plan: LaunchPlan, store_address: StoreAddress, say: Callable[[str], None]
    ) -> None:
        store = store_of_node(store_address)
        invitation = from_json(Invitation, json.loads(store.get(INVITATION)))
        invitation.check(request.job, request.project_root)
        self.folder = RunFolder.of(request.project_root, request.job.job.name, invitation.run_id)
        make_runs_folder(self.folder)
        catalog, writer = snapshots_of(plan, self.folder, request.project_root)
        check_shared(catalog, invitation, say)
        node = f"{socket.gethostname()}-{store.add('joined', 1)}"
        launch_folder = self.folder.path / "nodes" / node
        if plan.script is None:
            atomic_files.write(launch_folder / "train.py", (invitation.entry_point.encode(),))
        atomic_files.write(launch_folder / "torchrun.args", ("\n".join(plan.torchrun_args).encode(),))
        origins = origins_now(request.job, request.project_root, plan.job_files, next_launch_id())
        record = job_record(plan, Made(request.job, origins), request.overrides)
        atomic_files.write(launch_folder / JOB_JSON, (json.dumps(record, indent=2).encode(),))
        rank = request.node_rank if plan.rdzv_backend == "static" else None
        self._address, self._sees_leader = store_address, self._sees_launch(invitation.launch_id)
        agent = build_agent_process(
            plan,
            self.folder,
            launch_folder,
            node,
            store_address,
            request.project_root,
            writer,
            origins.launch_id,
            rank,
            has_own_folder=not self._sees_leader,
            accept_drift=request.accept_drift,
        )
        say(f"joining run {invitation.run_id} at {store_address.endpoint} as node {node}")
        super().__init__(
            node,
            agent,
            store,
            say,
            lambda: _reached_again(store_address, invitation.launch_id),
            is_store_outside=plan.is_store_outside,
        )

    @property
    def was_asked(self) -> bool:
        """True if a signal has asked this machine to exit, or the run was cancelled, also in a leader's folder that is seen here."""
        return super().was_asked or (self._sees_leader and self.folder.cancel.exists())

    def take_part(self) -> int | None:
        """Return as `JoinedNode.take_part`; None also if the launch ended because another machine leads the run by now."""
        code = super().take_part()
        if code is None and self.was_asked:  # the leader was lost before it could tell of a cancelled run
            return INTERRUPTED
        # Some machines alone lost the leader's signs of life, and continued without it.
        is_over = code in (ANSWER_IS_NO, BUDGET_SPENT) and self._is_store_outside
        return None if is_over and has_later_launch(self._address) else code

    def _sees_launch(self, launch_id: str) -> bool:
        """Return whether the run folder here is that of the machine that leads: the newest launch in it is this one."""
        numbers = self.folder.launch_numbers()
        if not numbers:
            return False
        made = records.read(self.folder.launch(numbers[-1]) / JOB_JSON)
        return isinstance(made, dict) and made.get("launch_id") == launch_id
