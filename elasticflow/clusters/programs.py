"""Calls the programs of a cluster: sbatch, squeue, kubectl."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from elasticflow.errors import SubmitError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANSWER_S = 60


def call(
    words: Sequence[str], given: str, what: str, *, if_missing: str, if_silent: str
) -> subprocess.CompletedProcess[str]:
    """Return how a program has ended, and its output.

    Args:
        what: Consequence if this machine does not have the program, as the beginning of a sentence.
        if_missing: Advice if this machine does not have the program.
        if_silent: Advice if the program has not ended after a minute.

    Raises:
        SubmitError: this machine does not have the program, or it does not answer.
    """
    if (program := shutil.which(words[0])) is None:
        raise SubmitError(f"{what}: {words[0]} is not on this machine", if_missing)
    try:
        done = subprocess.run(
            [program, *words[1:]],
            # A folder's name may be no UTF-8; the program gets its bytes.
            input=given.encode(errors="surrogateescape"),
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"{words[0]} has not answered for {_ANSWER_S} s", if_silent) from error
    said = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *said)
