"""One class per failure a user can cause, with its exit code and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

FINISHED = 0
ANSWER_IS_NO = 1
NOT_STARTED = 2
BUDGET_SPENT = 3
INTERRUPTED = 75
KILLED_BY_USER = 130

EXIT_CODES: dict[int, str] = {
    FINISHED: "yes, or finished",
    ANSWER_IS_NO: "the answer is no: findings, or the job failed",
    NOT_STARTED: "not started: usage, or the job was refused",
    BUDGET_SPENT: "the restart budget is spent",
    INTERRUPTED: "interrupted: starting the same command again resumes the run",
    KILLED_BY_USER: "ended at once by a second Ctrl-C",
}


class StopTraining(Exception):  # noqa: N818  # this is no error: the run counts as finished
    """Ends training on all ranks after the same step when the job's own code raises it on any rank.

    The training step, the dataset, the evaluation, a metric and the learning-rate schedule may raise it. A step in
    which any rank raises it changes no weight on any rank. Its text is the reason that logs and `status` give.
    """


# Messages of gloo and c10d if ranks take part in one collective with different sizes, or in different collectives: the
# job's own code causes this, and does so again after a restart. (torch 2.13)
COLLECTIVE_MISMATCH = (
    "Received data size doesn't match expected size",
    "op.preamble.length <= op.nbytes",
    "Detected mismatch between collectives on ranks",
)


class ElasticflowError(Exception):
    """A failure with a known cause: shown to the user without a traceback.

    Attributes:
        message: The problem and its place (a key, a path, a value).
        remedy: Advice, or None if the message has it.
    """

    exit_code: ClassVar[int] = NOT_STARTED

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}\n  help: {self.remedy}"


def in_words(error: Exception) -> str:
    """Return the text of an error of ours, with its remedy; of any other one, with the name of its class."""
    return str(error) if isinstance(error, ElasticflowError) else f"{type(error).__name__}: {error}"


def chain_of(error: BaseException, most: int = 11) -> Iterator[BaseException]:
    """Yield *error*, then the errors that it came from, each once; *most* in all."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(seen) < most:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


class JobRefusedError(ElasticflowError):
    """The job file has errors; they have been shown as diagnostics."""


class CaseError(ElasticflowError):
    """No case, or an unknown case, was given for a file with [matrix]; or a case was given for a file without it."""


class TorchMissingError(ElasticflowError):
    """A command that trains was given, and torch is not installed, or is of an untested version."""


class TorchChangedError(ElasticflowError):
    """The installed torch lacks a private name that elasticflow uses; the message has the name."""


class GpuMissingError(ElasticflowError):
    """A job asks for a worker per GPU on a machine where torch can use none."""


class SinkMissingError(ElasticflowError):
    """A sink of the job needs a package that is not installed."""


class RunLockedError(ElasticflowError):
    """Another process holds the run's lock: the run is running."""


class RunTakenError(ElasticflowError):
    """The lock file of a run that this process supervised is not the file it locked: the launch has ended."""

    exit_code = ANSWER_IS_NO


class RunTakenOverError(ElasticflowError):
    """Another start of the run has resumed from its snapshots: the training of this process no longer counts."""

    exit_code = ANSWER_IS_NO


class RunNotFoundError(ElasticflowError):
    """There is no run folder, run id or job of that name."""


class SnapshotNotFoundError(ElasticflowError):
    """There is no snapshot of that name, or no snapshot at all in that place."""


class ExportError(ElasticflowError):
    """The target exists or cannot be written, or the format cannot hold the requested weights."""


class LogsNotFoundError(ElasticflowError):
    """The run has no log of that generation or rank."""


class NotRunningError(ElasticflowError):
    """The run is not running on this machine."""


class ProfileError(ElasticflowError):
    """A requested trace cannot be taken."""


class NothingToResumeError(ElasticflowError):
    """There is no run that could be resumed."""


class DriftRefusedError(ElasticflowError):
    """A change since the last launch would corrupt the run, or change its trajectory without consent."""


class StorageError(ElasticflowError):
    """The snapshot URI cannot be read or written."""


class StorageFullError(StorageError):
    """There is no room at the snapshot URI: once there is, the same command continues."""

    exit_code = INTERRUPTED


class RecordError(ElasticflowError):
    """A file of the run cannot be used, and its content is recorded nowhere else; the launch has not begun."""


class RunFolderError(ElasticflowError):
    """The run folder can no longer be written: the launch has ended, and the same command resumes the run."""

    exit_code = INTERRUPTED


class NodeRefusedError(ElasticflowError):
    """This machine may not take part in the run: its versions or its job differ, or it does not see the snapshots."""


class LaunchNotFoundError(ElasticflowError):
    """No launch is served at the address given to `--join`."""


class LeaderMissingError(LaunchNotFoundError):
    """The run has had no leader for a long while: the leading machine may only be late, and the same command waits again."""

    exit_code = INTERRUPTED


class RendezvousError(ElasticflowError):
    """There is no store for the rendezvous at the address in the job."""


class InterfaceError(ElasticflowError):
    """This machine has no network interface of the kind that the job names."""


class TokenError(ElasticflowError):
    """The token that the machines of a run share is missing or unusable."""


class TokenRefusedError(ElasticflowError):
    """The store of a launch and this machine have different tokens."""


class LedElsewhereError(ElasticflowError):
    """Another process leads a run of the job in the given store."""


class ScaleError(ElasticflowError):
    """`--scale` cannot be read, or asks for nodes outside of the job's range."""


class PortTakenError(ElasticflowError):
    """The rendezvous endpoint's port is in use."""


class RayError(ElasticflowError):
    """Ray is not installed, no Ray cluster is reachable, or the cluster does not suit the run."""


class HostsError(ElasticflowError):
    """A file of hosts cannot be used: a line is no host, a host is not found, or their number does not suit the job."""


class RenderError(ElasticflowError):
    """The scheduler cannot run the job unchanged: a key or a name does not suit it."""


class SubmitError(ElasticflowError):
    """The scheduler has not accepted the job, or cannot be reached from here."""


class SlurmRefusedError(SubmitError):
    """Slurm has refused the job; the message has its words."""


class TrialRefusedError(ElasticflowError):
    """The job cannot be tried at the given world sizes, or for so few steps, on this machine."""


class FaultPlanError(ElasticflowError):
    """A fault plan cannot be read, or cannot be done to the run."""


class TrialFailedError(ElasticflowError):
    """A trial of the job failed, so there is nothing to compare.

    Attributes:
        traceback: Traceback of the worker that failed first; empty if it wrote none.
    """

    exit_code = ANSWER_IS_NO

    def __init__(self, message: str, remedy: str | None = None, *, traceback: str = "") -> None:
        super().__init__(message, remedy)
        self.traceback = traceback


class LaunchFolderError(ElasticflowError):
    """The launch folder cannot be written: it exists with other content, or was edited by hand."""


class ScriptError(ElasticflowError):
    """A training script cannot be read, or shows no training."""


class ScaffoldError(ElasticflowError):
    """`init` cannot write a job: files exist, or the model's file does not show enough."""


class WorkerError(ElasticflowError):
    """A failure inside a worker, with the class under which the restart budget counts it.

    Attributes:
        is_final: True: the job's code itself is refused, so that every further attempt would end in the same way.
    """

    exit_code = ANSWER_IS_NO
    failure_class: ClassVar[str] = "user_error"
    is_final: ClassVar[bool] = False


class DeviceError(WorkerError):
    """A worker finds no device as the job needs it: none of the type, too few, or another type than the others or before.

    Raised on the node that is wrong. Where another node can train without it, the launch continues so.
    """


class OtherDeviceError(DeviceError):
    """A worker of another node has a device of another type; that node is wrong."""

    failure_class = "peer"


class DatasetError(WorkerError):
    """The dataset has no length, or a length other than declared, or is not the data of the snapshot."""


class LoaderProcessError(WorkerError):
    """A process that loads data was killed."""

    failure_class = "crash"


class StateError(WorkerError):
    """State cannot be expressed without pickle, does not fit the snapshot, or would be in no snapshot."""

    is_final = True


class JobKeyError(StateError):
    """A key of the job file does not fit the job's model or data, which shows only once they are built.

    Attributes:
        key: Dotted key, with the indexes of lists: `optimizer.groups.0.match`.
    """

    def __init__(self, key: str, message: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy)
        self.key = key


class RanksDifferError(StateError):
    """Ranks differ in state that a snapshot holds once; the next attempt may succeed, as after a flipped bit."""

    is_final = False


class StepResultError(WorkerError):
    """A training step returned a value that is no loss, or an impossible count."""


class HookError(WorkerError):
    """A hook of the job changed the trained state."""

    is_final = True


class MetricError(WorkerError):
    """A metric of an evaluation cannot be made or measured, or is not one number."""


class ReplicasDifferError(WorkerError):
    """A rank's parameters or optimizer state differ from those of the other ranks after the same step.

    Attributes:
        ranks: Ranks in the minority; all ranks if there is no minority.
    """

    failure_class = "diverged"

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(
            message,
            "the snapshots are from before; if this comes again at the same step, something writes to parameters by "
            "rank, and if on the same machine, its memory or GPU is faulty",
        )
        self.ranks = ranks


class LoopDriftError(StateError):
    """The arguments of a script's loop differ from those of its snapshot: resuming would make it another run."""


class NotExchangedError(StateError):
    """The ranks' models differ because some or all gradients were not exchanged.

    Args:
        step: Number of the step after which they were compared.
        why: The missing exchange, in words.
        is_sharded: The model is sharded: replicas of it differ.
    """

    def __init__(self, step: int, tensors: list[str], why: str, *, is_sharded: bool = False) -> None:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        way = "wrap the model (model = run.wrap(model)) or use run.gradients"
        if is_sharded:
            way = "give fully_shard a mesh of all ranks, init_device_mesh(device, (replicas, shards))"
        super().__init__(
            f"the ranks' models differ after step {step} ({tensors[0] if tensors else 'set of tensors'}{more}): {why}",
            f"{way}; no snapshot was taken of it",
        )


class NonFiniteLossError(WorkerError):
    """The loss over the global batch is infinite or not a number."""

    failure_class = "nonfinite"


class SnapshotError(WorkerError):
    """A snapshot could not be written, or no snapshot could be read."""

    failure_class = "storage"


class StagingLimitError(WorkerError):
    """A worker stages more than `snapshots.staging_limit` allows."""
