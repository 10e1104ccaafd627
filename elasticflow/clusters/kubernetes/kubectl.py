"""Calls kubectl, which applies a manifest."""

from __future__ import annotations

import shutil
import subprocess

from elasticflow.errors import SubmitError

_ANSWER_S = 60


def apply(manifest: str) -> str:
    """Apply a manifest in kubectl's current context and namespace, and return kubectl's answer.

    Raises:
        SubmitError: kubectl is not installed, does not answer, or refused the manifest.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise SubmitError(
            "the job was not submitted: kubectl is not on this machine",
            "`elasticflow submit kubernetes JOB -o FILE` writes the manifest, to apply where kubectl is",
        )
    try:
        done = subprocess.run(
            [program, "apply", "-f", "-"],
            input=manifest,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(
            f"kubectl has not answered for {_ANSWER_S} s",
            "see whether the cluster is up: kubectl cluster-info",
        ) from error
    if done.returncode != 0:
        raise SubmitError(
            f"kubectl has refused the job: {done.stderr.strip()}",
            "`elasticflow submit kubernetes JOB --print` shows the manifest that kubectl was given",
        )
    return done.stdout
