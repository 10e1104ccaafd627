"""Calls the job's code in the child process of `--deep`, and reports to the parent."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from elasticflow.deep.messages import MESSAGES, Doing, Done, Note, Problem
from elasticflow.errors import ElasticflowError, JobKeyError, StepResultError, StopTraining
from elasticflow.runtime.process import failure
from elasticflow.runtime.training.replicated_step import WHOLE_REPLICA
from elasticflow.system.exceptions import is_own_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.deep.messages import DeepMessage, Facts

T = TypeVar("T")

_NO_DEVICE = ("No CUDA GPUs", "not compiled with CUDA", "NVIDIA driver", "CUDA driver", "No HIP GPUs")
_MOST_FRAMES = 4


class BrokenError(Exception):
    """A call of the job's code failed, and the problem was reported."""


class Report:
    """Sends the parent messages: the current activity, problems, notes and facts.

    Args:
        fd: Descriptor of the parent's pipe. Standard output belongs to the job's code.
        own: Folders of the job's own code: only frames in them are reported.
        sends_problems: False: only the current activity is sent, since a failed attempt is repeated in
            another way.
    """

    def __init__(self, fd: int, own: Sequence[str], *, sends_problems: bool = True) -> None:
        self._sends_problems = sends_problems
        self._fd, self._own = fd, tuple(f"{Path(folder).resolve()}{os.sep}" for folder in own)
        self._doing = self._key = ""

    def quietly(self) -> Report:
        """Return a report that sends no problems."""
        return Report(self._fd, self._own, sends_problems=False)

    def call(self, kind: str, key: str, doing: str, fn: Callable[[], T]) -> T:
        """Call the job's code and return its result, or report the problem.

        Args:
            kind: Kind of the problem if the call raises.
            key: Key of the job file that the call is about, until the call itself reports another activity.
            doing: The activity in words, in case the call never returns.

        Raises:
            BrokenError: the call raised another exception.
            StopTraining: the call raised it; the job's code may do so.
        """
        self.doing(doing, key)
        try:
            return fn()
        except (StopTraining, BrokenError):
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit() too: it would end a worker
            self.problem(kind, self._key, error)
            raise BrokenError from None

    def doing(self, what: str, key: str) -> None:
        """Report the next activity, in words; it may hang or end the process."""
        self._doing, self._key = what, key
        self._send(Doing(what, key))

    def problem(self, kind: str, key: str, error: BaseException) -> None:
        """Report the exception *error*, with the frames of the job's own code."""
        if not self._sends_problems:
            return
        text = failure.describe(error)
        if any(mark in text for mark in _NO_DEVICE):
            kind = "device"
        elif failure.classify(error) == "oom":
            kind = "memory"
        elif isinstance(error, StepResultError):
            kind = "loss"
        if isinstance(error, JobKeyError):
            key = error.key
        if isinstance(error, ElasticflowError):
            message, remedy = error.message, error.remedy or ""
        else:
            message, _, remedy = text.partition("\n")
            remedy = remedy.removeprefix("  help: ")
            message = f"{self._doing} raises {message}"
            remedy = remedy or _limit(message, kind)
        self._send(Problem(kind, key, message, remedy, tuple(self._frames(error))))

    def refuse(self, kind: str, key: str, error: ElasticflowError) -> NoReturn:
        """Report a problem that elasticflow itself found.

        Raises:
            BrokenError: always.
        """
        self.problem(kind, key, error)
        raise BrokenError

    def warn(self, kind: str, key: str, message: str, remedy: str = "") -> None:
        """Report something that may be a problem."""
        self._send(Problem(kind, key, message, remedy, is_warning=True))

    def note(self, text: str) -> None:
        """Report how a fact was found, or why it was not."""
        self._send(Note(text))

    def facts(self, facts: Facts) -> None:
        """Report facts."""
        self._send(facts)

    def end(self) -> None:
        """Report that everything was tried."""
        self._send(Done())

    def _send(self, message: DeepMessage) -> None:
        line = MESSAGES.encode(message).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def _frames(self, error: BaseException) -> list[str]:
        tb = traceback.extract_tb(error.__traceback__)
        frames = [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in tb]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append((error.filename, error.lineno or 0, "", (error.text or "").strip()))
        own = [frame for frame in frames if self._is_own(frame[0])]
        return [_shown(*frame) for frame in own[-_MOST_FRAMES:]]

    def _is_own(self, file: str) -> bool:
        path = Path(file)  # relative: our train.py, and Python's <frozen ...> modules
        return path.is_absolute() and str(path.resolve()).startswith(self._own) and is_own_code(file)


def _limit(message: str, kind: str) -> str:
    """Return the limit of elasticflow that an error of the job's code has met, with a remedy; empty if none is known."""
    if "FSDP" in message:
        return WHOLE_REPLICA
    if "MASTER_ADDR" in message or "process group" in message:
        if kind in {"step", "loss"}:
            return (
                "leave collectives of its own (all_reduce, barrier) out: gradients, losses, and scalars of the dict that a step returns "
                "are reduced over the workers for you, who need not call the model equally often; so one of its own may wait forever"
            )
        return f"the job's code asks for a process group, which train.py makes: {WHOLE_REPLICA}"
    if "Trainer" in message and ("attached" in message or "registered" in message):
        return (
            "a LightningModule is trained as a plain model, without a Trainer: let a function step(model, batch) return its loss, or "
            'a dict of loss and numbers to log instead of self.log: {"loss": loss, "accuracy": accuracy}; or name '
            "elasticflow.lightning:training_step, which takes both from the module"
        )
    return ""


def _shown(file: str, line: int, function: str, code: str) -> str:
    path, folder = Path(file), Path.cwd()
    name = str(path.relative_to(folder)) if path.is_relative_to(folder) else file
    where = f", in {function}" if function and function != "<module>" else ""
    return f"{name}:{line}{where}: {code}"
