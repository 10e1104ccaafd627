"""The process of an agent: `python -m elasticflow.launcher.agent.main PARENT_PID`, its configuration on standard input.

It starts the fork server and the writer first, since they import for seconds, then becomes the agent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.agent_process import AgentConfig
from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.helpers import STORE_LOST, HelperLostError
from elasticflow.launcher.fork_server.torchrun_arguments import TorchrunRefusedError
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.snapshots.client.writer_process import WriterNotStartedError, start_writer
from elasticflow.system.processes import adopt_orphans, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Serve until the supervisor stops the launch or dies."""
    die_with_parent(int(sys.argv[1]))
    adopt_orphans()
    config = from_json(AgentConfig, json.load(sys.stdin))
    # Signals to the whole process group must not end the agent: the supervisor asks for drains.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the agent can pass on a request to leave
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    heartbeats = WorkerHeartbeats(config.hang_timeout_s)
    launch = Path(config.launch_folder)
    server = ForkServer(
        launch / "train.py",
        config.path,
        config.modules,
        config.start_method,
        keep_fds=(heartbeats.fd,),
        seed=config.seed,
        arguments=(launch / "torchrun.args").read_text(encoding="utf-8").splitlines(),
    )
    code = _end_of(lambda: _serve(config, server, heartbeats))
    logging.shutdown()
    sys.stderr.flush()
    # Threads of the heartbeat may still wait for the store, which may be gone.
    os._exit(code)


def _end_of(serve: Callable[[], None]) -> int:
    """Call *serve* and return this process' exit code; the last line of its log says why."""
    try:
        serve()
    except HelperLostError as lost:
        sys.stderr.write(f"{lost}\n")
        return lost.agent_exit_code
    except TorchrunRefusedError as refused:
        sys.stderr.write(f"{refused}\n")
        return 1
    except StoreLostError as lost:  # seen before the heartbeat saw it
        sys.stderr.write(f"{lost}\n")
        return STORE_LOST
    return 0


def _serve(config: AgentConfig, server: ForkServer, heartbeats: WorkerHeartbeats) -> None:
    try:
        writer = start_writer(config.writer)
    except WriterNotStartedError as error:
        if error.ended_with is None:
            raise
        raise HelperLostError("snapshot writer", error.ended_with) from None
    try:
        # Only now: the two processes import for seconds.
        from elasticflow.launcher.agent.agent import build_agent

        agent = build_agent(config, server, writer, heartbeats)
        agent.announce()
        agent.run()
        agent.finish(config.grace_s)
    finally:
        writer.close()


if __name__ == "__main__":
    main()
