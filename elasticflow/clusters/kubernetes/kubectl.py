"""Calls kubectl, which applies a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.clusters.kubernetes.patch import place_of_unknown_field
from elasticflow.clusters.programs import call
from elasticflow.errors import SubmitError

if TYPE_CHECKING:
    from pathlib import Path


def apply(manifest: str, patch: Path | None = None) -> str:
    """Apply a manifest in kubectl's current context and namespace, and return kubectl's answer.

    Raises:
        SubmitError: kubectl is not installed, does not answer, or refused the manifest.
    """
    done = call(
        ["kubectl", "apply", "-f", "-"],
        manifest,
        "the job was not submitted",
        if_missing="`elasticflow submit kubernetes JOB -o FILE` writes the manifest, to apply where kubectl is",
        if_silent="see whether the cluster is up (kubectl cluster-info) and has the job (kubectl get jobs)",
    )
    if done.returncode != 0:
        place = None if patch is None else place_of_unknown_field(done.stderr, patch)
        raise SubmitError(
            f"kubectl has refused the job: {done.stderr.strip()}",
            f"correct kubernetes.patch at {place}"
            if place is not None
            else "`elasticflow submit kubernetes JOB --print` shows the manifest that kubectl was given",
        )
    return done.stdout
