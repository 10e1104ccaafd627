"""The peers: where each is installed, how each is started, what each promises, and what was set.

A peer starts one launcher for each node. Each has the settings that its README shows; `tuned` are those that its documentation names
for faster recovery. No code of a peer stands here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SCRIPTS = Path(__file__).with_name("scripts")
TORCH = "torch==2.13.0"
PG_TIMEOUT = {"PG_TIMEOUT_S": "10"}
EVERY = ("none", "worker", "node", "term", "stop", "half", "bit", "full", "join", "leave")
TOUCHED = ("worker", "node", "stop", "join", "leave")
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Layout:
    """Where a launcher stands.

    Attributes:
        bin: Folder of the environment's programs.
        node: Number of the launcher's node.
        nodes: Most nodes of the run.
        least: Fewest nodes of the run.
        first: Nodes at the start.
        workers: Workers on each node.
        port: A free port for the run; so are the next three.
        epochs: Epochs to train.
    """

    bin: Path
    node: int
    nodes: int
    least: int
    first: int
    workers: int
    port: int
    epochs: int


@dataclass(frozen=True)
class Peer:
    """One peer with one choice of settings.

    Attributes:
        name: Name of the peer.
        variant: Choice of settings: "as documented" or "tuned".
        packages: Requirements of its environment, which has the name *environment*.
        environment: Name of the environment.
        command: Returns the command line of a launcher.
        script: File that a user writes, whose lines are counted.
        checkpoints: Patterns of what one checkpoint is, below the folder of checkpoints.
        settings: Settings as they are printed.
        variables: Environment variables of the launchers.
        service: Returns the command line of a service that the peer needs besides.
        each_worker_is_a_node: Whether a launcher starts a single worker, also where the fault is no node's.
        not_promised: By fault, what its documentation does not promise; it is measured all the same.
        lossy: Why the peer does not promise that each sample is used once; empty: it does, or leaves it to the script.
        job: Job file that the script needs besides.
        faults: Faults that are tried: what tuned settings do not touch is tried with them alone.
    """

    name: str
    variant: str
    environment: str
    packages: tuple[str, ...]
    command: Callable[[Layout], Sequence[str]]
    script: str
    checkpoints: tuple[str, ...]
    settings: str
    variables: Mapping[str, str] = field(default_factory=dict)
    service: Callable[[Layout], Sequence[str]] | None = None
    each_worker_is_a_node: bool = False
    not_promised: Mapping[str, str] = field(default_factory=dict)
    lossy: str = ""
    job: str = ""
    faults: tuple[str, ...] = EVERY

    @property
    def key(self) -> str:
        """Name and choice of settings, as the command line takes them."""
        return self.name if self.variant == "as documented" else f"{self.name}:{self.variant}"


def _torchrun(
    script: str, *options: str, program: str = "torchrun", rdzv: str = ""
) -> Callable[[Layout], Sequence[str]]:
    def command(at: Layout) -> Sequence[str]:
        if at.nodes == 1:
            where = ["--standalone"]
        else:
            conf = ",".join(filter(None, [f"is_host={int(at.node == 0)}", rdzv]))
            where = [
                f"--nnodes={at.least}:{at.nodes}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{at.port}",
                "--rdzv-id=peers",
                f"--rdzv-conf={conf}",
            ]
        return [
            str(at.bin / program),
            *where,
            f"--nproc-per-node={at.workers}",
            *options,
            str(SCRIPTS / script),
        ]

    return command


def _torchft(at: Layout) -> Sequence[str]:
    port = f"--master-port={at.port + 1 + at.node}"
    options = ["--nnodes=1", "--nproc-per-node=1", port, "--max-restarts=10"]
    return [str(at.bin / "torchrun"), *options, str(SCRIPTS / "torchft_ddp.py")]


def _lighthouse(*options: str) -> Callable[[Layout], Sequence[str]]:
    def command(at: Layout) -> Sequence[str]:
        fixed = ["--bind", f"127.0.0.1:{at.port}", "--min_replicas", "1", "--quorum_tick_ms", "100"]
        return [str(at.bin / "torchft_lighthouse"), *fixed, *options]

    return command


def _ray(at: Layout) -> Sequence[str]:
    script = f"{at.bin / 'python'} {SCRIPTS / 'ray_train.py'}"
    # `ray start` asks for a token if the user has one, and a driver that is started afterwards has none.
    open_to_all = "export RAY_AUTH_MODE=disabled"
    start = f"{at.bin / 'ray'} start --num-cpus={at.workers} --node-ip-address=127.0.0.1 --object-store-memory=100000000 --disable-usage-stats"
    if at.nodes == 1:
        return ["bash", "-c", f"{open_to_all}; exec {script} local {at.workers} {at.workers} {at.workers}"]
    if at.node == 0:
        head = f"{start} --head --port={at.port} --include-dashboard=false"
        return [
            "bash",
            "-c",
            f"{open_to_all}; {head} && exec {script} 127.0.0.1:{at.port} {at.least} {at.nodes} {at.first}",
        ]
    join = f"{start} --address=127.0.0.1:{at.port} --block"
    return ["bash", "-c", f"{open_to_all}; until {join}; do sleep 0.5; done"]


def _elasticflow(job: str) -> Callable[[Layout], Sequence[str]]:
    def command(at: Layout) -> Sequence[str]:
        run = [str(at.bin / "python"), "-m", "elasticflow", "run", job]
        run += [] if at.node else ["--run-id=peers"]
        if at.nodes > 1:
            endpoint = f"127.0.0.1:{at.port}"
            run += [f"--set=nodes.max={at.nodes}", f"--set=nodes.endpoint={endpoint}"]
            run += [f"--join={endpoint}"] if at.node else []
        return [
            *run,
            f"--set=nodes.nproc_per_node={at.workers}",
            *(["--set=train.epochs=" + str(at.epochs)] if "job" in job else []),
        ]

    return command


_RDZV = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
_TUNED = "--max-restarts=100, process group's timeout 10 s, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, " + _RDZV
_ONE_FILE = ("checkpoint.pt",)
_FILES = "how a checkpoint is written and read is the script's affair"
_UNVERIFIED = "checkpoints are not verified"
_HANGS = "no detection of workers that hang"
_OWN_FILES = {"half": _FILES, "bit": _FILES, "full": _FILES}
_NO_DIGESTS = {"half": _UNVERIFIED, "bit": _UNVERIFIED, "full": "a save that fails is an error"}
_FIXED = dict.fromkeys(("node", "join", "leave"), "a fixed number of machines")
_GEMINI = {
    **_FIXED,
    "stop": "SCOUT, which finds workers that hang, needs GPUs",
    "full": "a save that fails is an error",
}
_LOSSY = "its sampler is called lossy, and the batch shrinks while a replica is away"
_RESUMABLE = "a loader with state_dict, as its warning advises"

PEERS = [
    Peer(
        "elasticflow, job file",
        "as documented",
        "elasticflow",
        (TORCH,),
        _elasticflow("elasticflow_job.toml"),
        "elasticflow_job.toml",
        ("peers/snapshots/*",),
        'defaults; snapshots.every = "50 steps"',
    ),
    Peer(
        "elasticflow, own loop",
        "as documented",
        "elasticflow",
        (TORCH,),
        _elasticflow("elasticflow_script.toml"),
        "elasticflow_loop.py",
        ("peers/snapshots/*",),
        'defaults; snapshots.every = "50 steps"',
        job="elasticflow_script.toml",
    ),
    Peer(
        "torchrun",
        "as documented",
        "torchrun",
        (TORCH, "numpy"),
        _torchrun("torchrun_ddp.py", "--max-restarts=3"),
        "torchrun_ddp.py",
        _ONE_FILE,
        "--max-restarts=3, c10d rendezvous",
        not_promised={**_OWN_FILES, "stop": _HANGS},
        faults=TOUCHED,
    ),
    Peer(
        "torchrun",
        "tuned",
        "torchrun",
        (TORCH, "numpy"),
        _torchrun("torchrun_ddp.py", "--max-restarts=100", rdzv=_RDZV),
        "torchrun_ddp.py",
        _ONE_FILE,
        _TUNED,
        {**FRESH_STORE, **PG_TIMEOUT},
        not_promised={**_OWN_FILES, "stop": _HANGS},
    ),
    Peer(
        "torchft",
        "as documented",
        "torchft",
        (TORCH, "torchft-nightly==2026.10.26", "numpy"),
        _torchft,
        "torchft_ddp.py",
        ("checkpoint-*.pt",),
        "lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000; Manager's defaults (timeouts 60 s)",
        service=_lighthouse("--join_timeout_ms", "10000"),
        each_worker_is_a_node=True,
        not_promised=_OWN_FILES,
        lossy=_LOSSY,
        faults=TOUCHED,
    ),
    Peer(
        "torchft",
        "tuned",
        "torchft",
        (TORCH, "torchft-nightly==2026.10.26", "numpy"),
        _torchft,
        "torchft_ddp.py",
        ("checkpoint-*.pt",),
        "lighthouse --join_timeout_ms 200 --heartbeat_timeout_ms 500; Manager's timeout 5 s",
        variables={"TORCHFT_TIMEOUT_S": "5", "RUST_LOG": "error"},
        service=_lighthouse("--join_timeout_ms", "200", "--heartbeat_timeout_ms", "500"),
        each_worker_is_a_node=True,
        not_promised=_OWN_FILES,
        lossy=_LOSSY,
    ),
    Peer(
        "NVRx",
        "as documented",
        "nvrx",
        (TORCH, "nvidia-resiliency-ext==0.4.1", "numpy"),
        _torchrun(
            "nvrx_ddp.py",
            "--max-restarts=3",
            "--ft-initial-rank-heartbeat-timeout=30",
            "--ft-rank-heartbeat-timeout=15",
            program="ft_launcher",
        ),
        "nvrx_ddp.py",
        _ONE_FILE,
        "ft_launcher --max-restarts=3 --ft-initial-rank-heartbeat-timeout=30 --ft-rank-heartbeat-timeout=15",
        not_promised=_OWN_FILES,
        faults=TOUCHED,
    ),
    Peer(
        "NVRx",
        "tuned",
        "nvrx",
        (TORCH, "nvidia-resiliency-ext==0.4.1", "numpy"),
        _torchrun(
            "nvrx_ddp.py",
            "--max-restarts=100",
            "--ft-initial-rank-heartbeat-timeout=30",
            "--ft-rank-heartbeat-timeout=5",
            "--ft-workload-check-interval=0.5",
            "--workers-stop-timeout=2",
            program="ft_launcher",
            rdzv=_RDZV,
        ),
        "nvrx_ddp.py",
        _ONE_FILE,
        "--max-restarts=100, heartbeats 30 and 5 s, checked every 0.5 s, --workers-stop-timeout=2; " + _RDZV,
        {**FRESH_STORE, **PG_TIMEOUT},
        not_promised=_OWN_FILES,
    ),
    Peer(
        "Ray Train",
        "as documented",
        "ray",
        (TORCH, "ray[train]==2.60.0"),
        _ray,
        "ray_train.py",
        ("peers/checkpoint_*",),
        "FailureConfig(max_failures=-1), CheckpointConfig(num_to_keep=2), num_workers=(least, most) on several nodes, elastic_resize_monitor_interval_s=5",
        not_promised={**_NO_DIGESTS, "stop": _HANGS},
    ),
    Peer(
        "Lightning under torchrun",
        "as documented",
        "lightning",
        (TORCH, "lightning==2.6.6"),
        _torchrun("lightning_module.py", "--max-restarts=3"),
        "lightning_module.py",
        ("last.ckpt",),
        'ModelCheckpoint(save_last=True), ckpt_path="last"; ' + _RESUMABLE + "; torchrun --max-restarts=3",
        not_promised={**_NO_DIGESTS, "stop": _HANGS},
        faults=("worker",),
    ),
    Peer(
        "Lightning under torchrun",
        "tuned",
        "lightning",
        (TORCH, "lightning==2.6.6"),
        _torchrun("lightning_module.py", "--max-restarts=100", rdzv=_RDZV),
        "lightning_module.py",
        ("last.ckpt",),
        _TUNED,
        {**FRESH_STORE, **PG_TIMEOUT},
        not_promised={**_NO_DIGESTS, "stop": _HANGS},
    ),
    Peer(
        "Accelerate under torchrun",
        "as documented",
        "accelerate",
        (TORCH, "accelerate==1.15.0"),
        _torchrun("accelerate_loop.py", "--max-restarts=3"),
        "accelerate_loop.py",
        ("checkpoints/*",),
        "save_state with automatic names, total_limit=3, use_seedable_sampler=True; torchrun --max-restarts=3",
        not_promised={**_NO_DIGESTS, **_FIXED, "stop": _HANGS},
        faults=("worker",),
    ),
    Peer(
        "Accelerate under torchrun",
        "tuned",
        "accelerate",
        (TORCH, "accelerate==1.15.0"),
        _torchrun("accelerate_loop.py", "--max-restarts=100", rdzv=_RDZV),
        "accelerate_loop.py",
        ("checkpoints/*",),
        _TUNED,
        {**FRESH_STORE, **PG_TIMEOUT},
        not_promised={**_NO_DIGESTS, **_FIXED, "stop": _HANGS},
    ),
    Peer(
        "lm-resiliency under torchrun",
        "as documented",
        "lm",
        (TORCH, "lm-resiliency==0.2.0"),
        _torchrun("lm_resiliency_ddp.py", "--max-restarts=4"),
        "lm_resiliency_ddp.py",
        ("**/*.pt",),
        "GEMINI: interval and disk_flush_interval 50 steps, verify_integrity=True; torchrun --max-restarts=4",
        not_promised=_GEMINI,
        faults=("worker",),
    ),
    Peer(
        "lm-resiliency under torchrun",
        "tuned",
        "lm",
        (TORCH, "lm-resiliency==0.2.0"),
        _torchrun("lm_resiliency_ddp.py", "--max-restarts=100", rdzv=_RDZV),
        "lm_resiliency_ddp.py",
        ("**/*.pt",),
        _TUNED,
        {**FRESH_STORE, **PG_TIMEOUT},
        not_promised=_GEMINI,
    ),
]
BY_KEY = {peer.key: peer for peer in PEERS}

# What cannot be measured here, with the reason.
LEFT_OUT = {
    "lm-resiliency at three workers": "pairs ranks, and refuses a number of them that is odd",
    "Composer 0.32.1": "requires torch 2.7.0, of which the package index has the CUDA build alone, and does not import on 2.13",
    "torchrun of torch 2.15": "the package index has the CUDA build alone, some 5 GB",
}


def python_of(peer: Peer, environments: Path) -> Path:
    """Return the folder of the peer's programs; elasticflow's are those of the checkout."""
    return (
        Path(sys.executable).parent
        if peer.environment == "elasticflow"
        else environments / peer.environment / "bin"
    )
