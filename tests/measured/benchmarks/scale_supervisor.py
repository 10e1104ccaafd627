"""The supervisor of `scale.py`, in a process of its own: the real one, whose key server counts what it is sent.

    python -m tests.measured.benchmarks.scale_supervisor PROJECT NODES PORT [served]     leads a launch, whose nodes join from elsewhere
    python -m tests.measured.benchmarks.scale_supervisor --serve PORT      serves keys, as `elasticflow rendezvous serve` does

It leads a launch with no agent on this machine. On standard output it writes a line of JSON for each event of the run that
the benchmark waits for, and one for each line on its standard input: what was used and counted until then.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.jobfile.tables.job import Job
from elasticflow.launcher import launch as launches
from elasticflow.launcher.rendezvous import store_server
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.rendezvous.token import given_token
from elasticflow.launcher.supervisor import agent_channel, launch_record
from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
from elasticflow.run_folder import RunFolder
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    import socket

    from elasticflow.launcher.rendezvous.store_server import _Client
    from elasticflow.protocol.tcp_store import Request

JOB = "scale"
SERVED = "served"
RUN_ID = "run"
# Instead of 2.5: a thousand nodes on two cores, which others use, too, are late with their signs of life.
SILENT_S = 60.0
_TOLD = frozenset(
    {
        events.RUN_STARTED,
        events.NODE_LOST,
        events.GENERATION_STARTED,
        events.GENERATION_ENDED,
        events.TRAINING_FIRST_STEP,
        events.SNAPSHOT_COMMITTED,
        events.CONNECTION_REFUSED,
    }
)


class CountingServer(StoreServer):
    """The key server; counts requests, bytes that it sends and receives, and the most connections at a time."""

    newest: CountingServer | None = None

    def __init__(self, listener: socket.socket, token: str = "") -> None:
        self.requests = self.sent = self.received = self.most_clients = 0
        self.cpu_s = 0.0
        CountingServer.newest = self
        super().__init__(listener, token)

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self.cpu_s = time.thread_time()

    def _answer(self, client: _Client, request: Request, parts: list[bytes]) -> None:
        self.requests += 1
        self.received += sum(map(len, parts))
        self.most_clients = max(self.most_clients, len(self._clients))
        super()._answer(client, request, parts)

    def _send(self, client: _Client, data: bytes) -> None:
        self.sent += len(data)
        super()._send(client, data)


def sample(began: float) -> dict[str, Any]:
    """Return what this process has used until now: seconds, CPU seconds of its threads, counts, memory."""
    server = CountingServer.newest
    cpu = {"supervisor": _thread_cpu_s(threading.main_thread()), "keys": 0.0}
    counts = dict.fromkeys(("requests", "sent", "received", "connections"), 0)
    if server is not None:
        cpu["keys"] = server.cpu_s or _thread_cpu_s(server._thread)
        counts = {
            "requests": server.requests,
            "sent": server.sent,
            "received": server.received,
            "connections": server.most_clients,
        }
    return {
        "seconds": time.monotonic() - began,
        **cpu,
        "process": time.process_time(),
        **counts,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _thread_cpu_s(thread: threading.Thread) -> float:
    if thread.ident is None or not thread.is_alive():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def job_of(nodes: int, port: int, *, is_served: bool = False) -> Job:
    """Return the job: one worker on each node, a generation of all nodes or of all but one.

    Args:
        nodes: Most of them.
        port: On this machine.
        is_served: Another process than the supervisor serves the keys.
    """
    outside = {"rdzv_conf": {"is_host": False}} if is_served else {}
    return Job.model_validate(
        {
            "job": {"name": JOB},
            "model": {"entry": "pieces:Net", "loss": "torch.nn.functional:cross_entropy"},
            "optimizer": {"entry": "torch.optim:SGD", "args": {"lr": 0.1}},
            "dataset": {"entry": "pieces:digits", "global_batch_size": 8192},
            "train": {"epochs": 2},
            "nodes": {
                "nproc_per_node": 1,
                "min": max(1, nodes - 1),
                "max": nodes,
                "endpoint": f"127.0.0.1:{port}",
            },
            "restarts": {"budget": 100},
            **({"torchrun": outside} if outside else {}),
        }
    )


def tell(record: dict[str, Any]) -> None:
    """Write a line to standard output; several threads may."""
    os.write(1, json.dumps(record).encode() + b"\n")


def _answer_samples(began: float) -> None:
    for _ in sys.stdin:
        tell({"sample": sample(began)})


def _warn(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def lead(project: Path, nodes: int, port: int, *, is_served: bool) -> int:
    """Lead a launch to its end; return its exit code."""
    began = time.monotonic()
    vars(store_server)["StoreServer"] = CountingServer
    vars(agent_channel)["SILENT_S"] = SILENT_S
    threading.Thread(target=_answer_samples, args=(began,), daemon=True).start()
    request = launch_record.Request(
        job_of(nodes, port, is_served=is_served),
        (project / "job.toml",),
        (),
        project,
        RunFolder.of(project, JOB, RUN_ID),
        scale=(ScaleChange(0.0, 0),),
    )

    def show(record: dict[str, Any]) -> None:
        if record.get("event") in _TOLD:
            tell({key: record.get(key) for key in ("event", "generation", "nodes", "reason", "node")})

    code = launches.launch(request, show, _warn)
    tell({"sample": sample(began), "code": code})
    return code


def serve(port: int) -> int:
    """Serve keys until a signal comes."""
    began = time.monotonic()
    server = CountingServer(listen("127.0.0.1", port), given_token(None, Path()))
    threading.Thread(target=_answer_samples, args=(began,), daemon=True).start()
    tell({"event": "serving"})
    signal.sigwait({signal.SIGTERM})
    server.close()
    return 0


if __name__ == "__main__":
    die_with_parent(os.getppid())
    if sys.argv[1] == "--serve":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        sys.exit(serve(int(sys.argv[2])))
    sys.exit(lead(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), is_served=sys.argv[4:] == [SERVED]))
