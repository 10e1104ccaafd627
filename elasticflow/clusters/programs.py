"""Calls the programs of a cluster: sbatch, squeue, kubectl."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.errors import SubmitError

ANSWER_S = 60


def call(
    words: Sequence[str], given: str, *, if_missing: SubmitError, if_silent: SubmitError
) -> subprocess.CompletedProcess[str]:
    """Return how a program has ended, and its output.

    Args:
        if_missing: Raised if this machine does not have the program.
        if_silent: Raised if the program has not ended after `ANSWER_S`.
    """
    program = shutil.which(words[0])
    if program is None:
        raise if_missing
    try:
        done = subprocess.run(
            [program, *words[1:]],
            # A folder's name may be no UTF-8; the program gets its bytes.
            input=given.encode(errors="surrogateescape"),
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise if_silent from error
    said = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *said)
