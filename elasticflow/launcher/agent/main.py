"""The process of an agent: `python -m elasticflow.launcher.agent.main PARENT_PID`, its configuration on standard input.

It starts the fork server at once, which imports for seconds, and does everything else beside that: it may have been started
before its launch is known (`waiting_agent.py`). The writer starts as soon as the configuration has arrived.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats, heartbeat_memory
from elasticflow.launcher.fork_server.server_process import start_server
from elasticflow.system.masking import mask_streams
from elasticflow.system.processes import adopt_orphans, append_output_to, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.launcher.compiler_cache.keeper import CompilerCacheKeeper
    from elasticflow.launcher.fork_server.client import ForkServer
    from elasticflow.launcher.fork_server.server_process import ServerProcess


def main() -> None:
    """Serve until the supervisor stops the launch or dies."""
    die_with_parent(int(sys.argv[1]))
    adopt_orphans()
    # Signals to the whole process group must not end the agent: the supervisor asks for drains.
    # SIGUSR1: until the agent can pass on a request to leave.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    memory = heartbeat_memory()
    started = start_server((memory,))
    import logging

    config = _configuration()
    append_output_to(config.setup.log)
    os.environ.update(config.setup.environment)
    mask_streams()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    script = config.setup.script
    heartbeats = WorkerHeartbeats(
        config.hang_timeout_s,
        memory=memory,
        beats_late=script is not None,
        silence_s=None if script is None else script.silence_s,
    )
    cache = _compiler_cache(config) if config.compiles else None
    server = _fork_server(started, config, memory, {} if cache is None else cache.variables())
    if cache is not None:
        cache.start_loading()
    code = _end_of(lambda: _serve(config, server, heartbeats, cache))
    logging.shutdown()
    sys.stderr.flush()
    # Threads of the heartbeat may still wait for the store, which may be gone.
    os._exit(code)


def _configuration() -> AgentConfig:
    """Return the configuration, once it has arrived; exit if the supervisor has ended without sending it."""
    import json

    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.protocol.json_codec import from_json

    text = sys.stdin.read()
    if not text:  # the supervisor has ended
        os._exit(0)
    return from_json(AgentConfig, json.loads(text))


def _compiler_cache(config: AgentConfig) -> CompilerCacheKeeper:
    """Return the keeper of the compiler's cache; jobs that compile nothing do not import it."""
    from pathlib import Path

    from elasticflow.launcher.compiler_cache.keeper import CompilerCacheKeeper
    from elasticflow.run_folder import RunFolder

    run = RunFolder(Path(config.run_folder))
    return CompilerCacheKeeper(run, config.node, config.writer, os.environ)


def _fork_server(
    started: ServerProcess, config: AgentConfig, memory: int, variables: Mapping[str, str]
) -> ForkServer:
    """Return the fork server: a new one if workers spawn, or if the launch sets variables that it read early."""
    from dataclasses import replace

    from elasticflow.launcher.fork_server.client import ForkServer

    setup = replace(config.setup, environment={**config.setup.environment, **variables})
    if setup.start_method != "spawn" and not config.imports_anew:
        return ForkServer(started, setup)
    started.end()
    # It inherits this process' output, which goes to the log already.
    return ForkServer.start(replace(setup, log=""), (memory,))


def _end_of(serve: Callable[[], None]) -> int:
    """Call *serve* and return this process' exit code; the last line of its log says why."""
    from elasticflow.errors import TokenRefusedError
    from elasticflow.launcher.fork_server.protocol import TorchrunRefusedError
    from elasticflow.launcher.fork_server.server_process import STORE_LOST, HelperLostError
    from elasticflow.protocol.store_address import StoreLostError

    try:
        serve()
    except HelperLostError as lost:
        sys.stderr.write(f"{lost}\n")
        return lost.agent_exit_code
    except TorchrunRefusedError as refused:
        sys.stderr.write(f"{refused}\n")
        return 1
    except (StoreLostError, TokenRefusedError) as lost:  # seen before the heartbeat saw it
        sys.stderr.write(f"{lost}\n")
        return STORE_LOST
    return 0


def _serve(
    config: AgentConfig,
    server: ForkServer,
    heartbeats: WorkerHeartbeats,
    cache: CompilerCacheKeeper | None,
) -> None:
    from elasticflow.launcher.fork_server.server_process import HelperLostError
    from elasticflow.snapshots.client.writer_process import WriterNotStartedError, start_writer

    try:
        writer = start_writer(config.writer)
    except WriterNotStartedError as error:
        if error.ended_with is None:
            raise
        raise HelperLostError("snapshot writer", error.ended_with) from None
    try:
        writer.load_ahead()
        from elasticflow.launcher.agent.agent import build_agent

        agent = build_agent(config, server, writer, heartbeats, cache)
        agent.announce()
        agent.run()
        agent.finish(config.grace_s)
    finally:
        writer.close()


if __name__ == "__main__":
    main()
