"""Starting the agent: its configuration and its process."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.waiting_agent import waiting_agent
from elasticflow.launcher.fork_server.protocol import Setup
from elasticflow.launcher.fork_server.server_process import HELPER_KILLED, STORE_LOST
from elasticflow.protocol import worker_environment
from elasticflow.protocol.child_processes import (
    Warm,  # noqa: TC001  # the codec reads the fields' types
)
from elasticflow.protocol.handshake import TOKEN
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.snapshots.client.writer_process import WriterStart  # noqa: TC001  # the codec reads the fields' types
from elasticflow.system.free_memory import OomKills
from elasticflow.system.masking import SECRET_NAMES
from elasticflow.system.processes import StoppedChild, is_killed_from_outside, signal_or_code

if TYPE_CHECKING:
    import signal

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.launcher.agent.waiting_agent import WaitingAgent
    from elasticflow.launcher.restarts.failure_classes import FailureClass
    from elasticflow.run_folder import RunFolder


# Bytes: enough for a traceback.
_LAST_WORDS = 2000


@dataclass(frozen=True)
class AgentConfig:
    """The supervisor's configuration of an agent, given on standard input: every user may read command lines.

    Attributes:
        setup: Setup of the node's fork server: the job's code, the workers' program, the launch's variables and log.
        rendezvous: Where the launch's keys are (`StoreAddress.url`).
        hang_timeout_s: Longest time without progress; `HangTimeouts` learns shorter limits.
        grace_s: Seconds the writer has for what it holds when the launch ends.
        node_rank: This node's place among all, where the rendezvous is static.
        warm: Value of `restarts.warm`: says what a restart finds ready. Workers that run a script have no standbys.
        compiles: Workers compile the model: the compiler's cache is kept.
        imports_anew: The launch sets variables that a fork server which was started before has missed.
        interface: Name, address or network of the interface that workers talk over; None: that towards the keys.
        has_own_folder: The machine that leads does not see this one's run folder.
    """

    setup: Setup
    writer: WriterStart
    run_folder: str
    node: str
    rendezvous: str
    hang_timeout_s: float
    grace_s: float
    node_rank: int | None = None
    warm: Warm = "auto"
    compiles: bool = False
    imports_anew: bool = False
    interface: str | None = None
    has_own_folder: bool = False

    @property
    def store_address(self) -> StoreAddress:
        """Address of the launch's keys, with the token of this process' environment."""
        return StoreAddress.parse(self.rendezvous, self.setup.environment.get(TOKEN, ""))


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent.

    Attributes:
        exit_code: As `Popen.returncode` gives it: negative is a signal.
        last_words: The end of what it and its helpers printed.
        is_for_memory: The kernel killed it, or a helper of its, because memory ran out.
    """

    exit_code: int
    last_words: str = ""
    is_for_memory: bool = False

    @property
    def failure_class(self) -> FailureClass:
        """The class under which the budget counts it."""
        return "oom" if self.is_for_memory else "agent_lost"

    @property
    def cause(self) -> str:
        """The agent's end in words: `was killed by SIGKILL`, `ended, since its snapshot writer was killed by SIGKILL`."""
        return f"{self._how} (memory ran out)" if self.is_for_memory else self._how

    @property
    def _how(self) -> str:
        if self.exit_code < 0:
            return f"was {signal_or_code(self.exit_code)}"
        if self.exit_code == STORE_LOST:
            return "ended, since the launch's store does not answer"
        lines = [line.strip() for line in self.last_words.splitlines() if line.strip()]
        if self.exit_code == 0 or not lines:
            return f"ended with {signal_or_code(self.exit_code)}"
        return f"ended, since {lines[-1]}" if lines[-1].startswith("its ") else f"ended: {lines[-1]}"

    @property
    def is_its_own_doing(self) -> bool:
        """True if another agent may well end in the same way: unless the agent or a helper was killed from outside."""
        return self.is_for_memory or not (self.exit_code == STORE_LOST or _is_killed(self.exit_code))


def _is_killed(exit_code: int | None) -> bool:
    """Return whether an agent that ended with *exit_code*, or a helper of its, was killed from outside."""
    return exit_code == HELPER_KILLED or is_killed_from_outside(exit_code)


class AgentProcess:
    """The agent of a node on this machine; it dies with the thread that started it."""

    def __init__(self, config: AgentConfig, launch_id: str) -> None:
        self._config, self._launch_id = config, launch_id
        self._log = Path(config.setup.log)
        self._agent: WaitingAgent | None = None
        self._stopped: StoppedChild | None = None
        self._oom_kills: OomKills | None = None
        self._began = 0

    def start(self) -> None:
        """Start the agent; what it and its helpers print is appended to the log."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._began = log.tell()
        self._oom_kills = OomKills()
        self._agent = waiting_agent(self._launch_id)
        self._stopped = StoppedChild(self._agent.process, time.monotonic())
        assert self._agent.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._agent.process.stdin as stdin:
            stdin.write(to_json(self._config).encode())

    def exit_code(self) -> int | None:
        """Return how the agent ended, or None while it lives."""
        assert self._agent is not None
        code = self._agent.process.poll()
        if code is not None:
            self._keep_output(self._agent)
        return code

    def is_killed_for_memory(self) -> bool:
        """Return whether the agent, which has ended, or a helper of its was killed because memory ran out."""
        assert self._agent is not None
        assert self._oom_kills is not None
        process = self._agent.process
        return _is_killed(process.poll()) and self._oom_kills.includes(process.pid)

    def end_if_stopped(self) -> None:
        """Kill the agent if a signal stopped it a while ago; to be called often."""
        assert self._stopped is not None
        self._stopped.look(time.monotonic())

    def _keep_output(self, agent: WaitingAgent) -> None:
        """Append to the log what the agent, which has ended, printed before it knew its log."""
        if not agent.output.closed:
            # Someone may have removed the logs: no reason to end a launch.
            with contextlib.suppress(OSError), agent.output as output, self._log.open("ab") as log:
                output.seek(0)
                log.write(output.read())

    def send(self, number: signal.Signals) -> None:
        """Send *number* to the agent, if it lives."""
        assert self._agent is not None
        self._agent.process.send_signal(number)

    def last_words(self) -> str:
        """Return the end of what the agent and its helpers have printed since it was started; empty if that was removed."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._began, log.seek(0, os.SEEK_END) - _LAST_WORDS))
            return log.read().decode("utf-8", "replace")
        return ""

    def end(self) -> None:
        """Kill the agent, with everything below it, if it lives; it is gone afterwards."""
        if self._agent is not None:
            self._agent.process.kill()
            self._agent.process.wait()
            self._keep_output(self._agent)


def build_agent_process(
    plan: LaunchPlan,
    folder: RunFolder,
    launch_folder: Path,
    node: str,
    address: StoreAddress,
    project_root: Path,
    writer: WriterStart,
    launch_id: str,
    node_rank: int | None = None,
    *,
    has_own_folder: bool = False,
    accept_drift: bool = False,
) -> AgentProcess:
    """Return the agent of *node* on this machine, not yet started.

    Args:
        launch_folder: Where train.py lies.
        launch_id: Id of the launch on this machine.
        node_rank: The node's place among all, where the rendezvous is static.
        has_own_folder: The machine that leads does not see the run folder.
        accept_drift: A script's loop may differ from the run's launch before; so it may where the variable is set by hand.
    """
    marks = {worker_environment.RUN_ID: folder.run_id, worker_environment.RUN_FOLDER: str(folder.path)}
    if plan.env_secrets:
        marks[SECRET_NAMES] = ",".join(plan.env_secrets)
    if address.token:
        marks[TOKEN] = address.token
    if plan.script is not None:
        marks[worker_environment.LOOP] = plan.loop_settings(project_root).to_json()
        marks["TORCHELASTIC_MAX_RESTARTS"] = str(plan.restarts.budget)
        if wanted := "1" if accept_drift else os.environ.get(worker_environment.ACCEPT_DRIFT):
            marks[worker_environment.ACCEPT_DRIFT] = wanted
    setup = Setup(
        entry_point=str(launch_folder / "train.py"),
        path=tuple(str(project_root / part) for part in plan.module_path),
        # The client of etcd takes a fifth of a second to import.
        modules=plan.modules
        if address.backend != "etcd-v2"
        else (*plan.modules, "elasticflow.protocol.etcd_store"),
        start_method="spawn" if plan.restarts.warm == "off" else plan.start_method,
        seed=plan.seed,
        arguments=plan.torchrun_args,
        environment={**plan.env, **plan.environment, **marks},
        log=str(folder.agent_log(node).absolute()),
        script=None if plan.script is None else plan.script.program(project_root),
    )
    config = AgentConfig(
        setup,
        writer,
        run_folder=str(folder.path),
        node=node,
        rendezvous=address.url,
        hang_timeout_s=plan.restarts.hang_timeout_s,
        grace_s=plan.restarts.grace_s,
        node_rank=node_rank,
        # A standby runs train.py, and cannot know what a script would have done by then.
        warm=plan.restarts.warm if plan.script is None else "fork",
        compiles=plan.compiles,
        imports_anew=any(map(is_read_early, plan.env)),
        interface=plan.interface,
        has_own_folder=has_own_folder,
    )
    return AgentProcess(config, launch_id)


# Variables of libraries that the server imports only once it knows the job's variables. The interpreter and the loader, numpy, torch
# and what these load read hundreds of others, under names of any kind and in C, too: they cannot be listed.
_LATER = (
    "ACCELERATE_", "AIM_", "ANTHROPIC_", "AWS_", "AZURE_", "BITSANDBYTES_", "CLEARML_", "COMET_", "DATASETS_", "DIFFUSERS_",
    "DVC_", "GCS_", "GITHUB_", "GOOGLE_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "KAGGLE_", "MLFLOW_", "NEPTUNE_", "NLTK_",
    "OPENAI_", "PEFT_", "POLARS_", "RAY_", "S3_", "SENTENCE_TRANSFORMERS_", "SENTRY_", "SLURM_", "SPACY_", "TFDS_", "TIKTOKEN_",
    "TIMM_", "TOKENIZERS_", "TRACKIO_", "TRANSFORMERS_", "WANDB_",
)  # fmt: skip


def is_read_early(name: str) -> bool:
    """Return whether a variable may have been read before the server knew the job's."""
    return not name.startswith(_LATER)
