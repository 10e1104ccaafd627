"""What a probe of a job's code tells its parent, and how the code is called."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from elasticflow import StopTraining
from elasticflow.errors import ElasticflowError, StepResultError
from elasticflow.runtime.process import failure
from elasticflow.runtime.training import replicable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_NO_DEVICE = ("No CUDA GPUs", "not compiled with CUDA", "NVIDIA driver", "CUDA driver", "No HIP GPUs")
_MOST_FRAMES = 4
_OURS = str(Path(__file__).parents[2])
_INSTALLED = {"site-packages", "dist-packages"}


class BrokenError(Exception):
    """A call failed, and its problem was told."""


class Report:
    """Tells the parent what is done, what is wrong and what was learnt: a JSON line each.

    Args:
        fd: The parent's pipe. Standard output belongs to the job's code.
        own: Folders of the job's own code: the frames that a person wants to see.
        tells_problems: False: what is done is told alone, since it will be done in another way if it fails.
    """

    def __init__(self, fd: int, own: Sequence[str], *, tells_problems: bool = True) -> None:
        self._tells_problems = tells_problems
        self._fd, self._own = fd, tuple(f"{Path(folder).resolve()}{os.sep}" for folder in own)
        self._doing = ""

    def quietly(self) -> Report:
        """Return one that tells no problems."""
        return Report(self._fd, self._own, tells_problems=False)

    def call(self, kind: str, key: str, doing: str, fn: Callable[[], T]) -> T:
        """Return what the job's code returns, or tell the problem.

        Args:
            kind: Of the problem that an exception is.
            key: Key of the job file that it is about.
            doing: What is being done, should it never end.
            fn: The call.

        Raises:
            BrokenError: it raised something.
            StopTraining: it raised that, which is its right.
        """
        self.doing(doing, key)
        try:
            return fn()
        except StopTraining:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit() too: it would end a worker
            self.problem(kind, key, error)
            raise BrokenError from None

    def doing(self, what: str, key: str) -> None:
        """Tell what comes next: it may hang, or end the process."""
        self._doing = what
        self._tell(doing=what, key=key)

    def problem(self, kind: str, key: str, error: BaseException) -> None:
        """Tell the exception *error*, with the frames of the job's own code."""
        if not self._tells_problems:
            return
        text = failure.describe(error)
        if any(mark in text for mark in _NO_DEVICE):
            kind = "device"
        elif failure.classify(error) == "oom":
            kind = "memory"
        elif isinstance(error, StepResultError):
            kind = "loss"
        if isinstance(error, ElasticflowError):
            message, remedy = error.message, error.remedy or ""
        else:
            message, _, remedy = text.partition("\n")
            remedy = remedy.removeprefix("  help: ")
            message = f"{self._doing} raises {message}"
            if "MASTER_ADDR" in message or "process group" in message:
                remedy = (
                    remedy
                    or f"the job's code asks for a process group, which train.py makes: {replicable.REMEDY}"
                )
        self._tell(problem=kind, key=key, message=message, help=remedy, frames=self._frames(error))

    def refuse(self, kind: str, key: str, error: ElasticflowError) -> NoReturn:
        """Tell a problem that we found ourselves.

        Raises:
            BrokenError: always.
        """
        self.problem(kind, key, error)
        raise BrokenError

    def warn(self, kind: str, key: str, message: str, remedy: str = "") -> None:
        """Tell what need not be a problem."""
        self._tell(problem=kind, key=key, message=message, help=remedy, frames=[], is_warning=True)

    def note(self, text: str) -> None:
        """Tell how something was found out, or why it was not."""
        self._tell(note=text)

    def learnt(self, **facts: Any) -> None:
        """Tell facts."""
        self._tell(facts=facts)

    def end(self) -> None:
        """Tell that everything was tried."""
        self._tell(end=True)

    def _tell(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def _frames(self, error: BaseException) -> list[str]:
        tb = traceback.extract_tb(error.__traceback__)
        found = [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in tb]
        if isinstance(error, SyntaxError) and error.filename:
            found.append((error.filename, error.lineno or 0, "", (error.text or "").strip()))
        own = [each for each in found if self._is_own(each[0])]
        return [_frame(*each) for each in own[-_MOST_FRAMES:]]

    def _is_own(self, file: str) -> bool:
        path = Path(file)  # relative: our train.py, and what Python calls <frozen ...>
        is_own = path.is_absolute() and str(path.resolve()).startswith(self._own)
        return is_own and not file.startswith(_OURS) and not _INSTALLED & set(path.parts)


def _frame(file: str, line: int, function: str, code: str) -> str:
    path = Path(file)
    here = Path.cwd()
    shown = str(path.relative_to(here)) if path.is_relative_to(here) else file
    where = f", in {function}" if function and function != "<module>" else ""
    return f"{shown}:{line}{where}: {code}"
