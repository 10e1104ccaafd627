"""Taking part in a launch that another machine supervises: `run JOB --join HOST:PORT` (floor 3)."""

from __future__ import annotations

import json
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import durable
from elasticflow.compiler.plan import plan_job
from elasticflow.errors import INTERRUPTED, KILLED_BY_USER, HeadNotFoundError, NodeRefusedError
from elasticflow.launcher.agent_process import agent_of
from elasticflow.launcher.invitation import Invitation
from elasticflow.launcher.launch import check_torch, writer_config
from elasticflow.launcher.leave_requests import LeaveRequests
from elasticflow.run_folder import RunFolder, snapshot_place
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

    from elasticflow.launcher.agent_process import AgentProcess
    from elasticflow.launcher.launch import Request

_POLL_S = 0.05
_CONNECT_S = 60.0
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Head:
    """Where the launch's store is served."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return host:port."""
        return f"{self.host}:{self.port}"


def join(request: Request, head: Head, say: Callable[[str], None], warn: Callable[[str], None]) -> int:
    """Take part in the launch at *head* until it is over or this machine is to leave; return the exit code.

    Args:
        request: The job as it is here; its run folder is not used.
        head: From `--join`.
        say: Called with what a person should know.
        warn: Called with each sentence a person should read before.

    Raises:
        HeadNotFoundError: nobody answers there.
        NodeRefusedError: this machine would train something else, or does not see the run's snapshots.
    """
    check_torch(warn)
    store = _connect(head, say)
    from elasticflow.launcher.rendezvous import INVITATION

    invitation = Invitation(**json.loads(store.get(INVITATION)))
    invitation.check(request.job)
    plan = plan_job(request.job, project_root=request.project_root, job_files=request.files)
    folder = RunFolder.of(request.project_root, request.job.job.name, invitation.run_id)
    uri, prefix = snapshot_place(plan.snapshots.uri, folder, request.project_root)
    record = Catalog(Storage(uri, plan.snapshots.options), prefix).read_job_record()
    if record is None or record["run_id"] != invitation.run_id:
        raise NodeRefusedError(
            f"this machine does not see the snapshots of run {invitation.run_id}: nothing of it lies in {uri}",
            "set snapshots.uri to a place that all machines see, such as s3://bucket/prefix or a shared folder",
        )
    node = f"{socket.gethostname()}-{store.add('joined', 1)}"
    launch_folder = folder.path / "nodes" / node
    durable.write(launch_folder / "train.py", (invitation.entry_point.encode(),))
    durable.write(launch_folder / "torchrun.args", ("\n".join(plan.torchrun_args).encode(),))
    agent = agent_of(
        plan,
        folder,
        launch_folder,
        node,
        (head.host, head.port),
        request.project_root,
        writer_config(plan, uri, prefix, folder.run_id),
    )
    say(f"joining run {invitation.run_id} at {head} as node {node}")
    return _Membership(node, agent, store, say).run()


def _connect(head: Head, say: Callable[[str], None]) -> Store:
    """Return the launch's store; a head that is still starting is waited for.

    Raises:
        HeadNotFoundError: nobody answers in time.
    """
    deadline = time.monotonic() + _CONNECT_S
    told = False
    while True:
        try:
            socket.create_connection((head.host, head.port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise HeadNotFoundError(
                    f"nobody serves a launch at {head}: {error}",
                    "start the run on that machine first, with nodes.endpoint naming it, and open the port",
                ) from error
            if not told:
                told = True
                say(f"waiting for {head}: {error}")
            time.sleep(_AGAIN_S)
        else:
            break
    from elasticflow.launcher.rendezvous import join_store  # torch, once it is of use

    return join_store(head.host, head.port)


class _Membership:
    """This machine's part in the launch: its agent, and the signals that end it."""

    def __init__(self, node: str, agent: AgentProcess, store: Store, say: Callable[[str], None]) -> None:
        from elasticflow.launcher.rendezvous import EXIT_CODE, Feed

        self._node, self._agent, self._store, self._say = node, agent, store, say
        self._feed = Feed(store)
        self._exit_code = EXIT_CODE
        self._asked = LeaveRequests()

    def run(self) -> int:
        """Return the exit code once the agent has left for good; nothing that it started lives afterwards."""
        self._asked.listen()
        try:
            self._agent.start()
            has_asked = False
            while True:
                time.sleep(_POLL_S)
                if len(self._asked.numbers) > 1:
                    return KILLED_BY_USER
                if self._asked.numbers and not has_asked:
                    has_asked = True
                    self._say("asked to leave: the workers leave after their step")
                    self._agent.send(signal.SIGUSR1)
                code = self._agent.exit_code()
                if code is not None and (final := self._ended(code)) is not None:
                    return final
        finally:
            self._agent.end()

    def _ended(self, code: int) -> int | None:
        """Return this process' exit code now that the agent has ended; None if it was started again."""
        try:
            if self._store.check([self._exit_code]):
                return int(self._store.get(self._exit_code))
            if self._asked.numbers:
                return INTERRUPTED
            self._feed.post(
                {"type": "died", "node": self._node, "error": f"its agent ended with code {code}"}
            )
        except RuntimeError as error:
            self._say(f"the launch is gone: {error}")
            return INTERRUPTED
        self._say(f"the agent ended with code {code}, and is started again")
        self._agent.start()
        return None
