"""A job's model in its library's own format, saved in a child process in which the job's own code builds it."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from importlib import util
from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.factories import call_forms, values_of_data
from elasticflow.compiler.entry_point.render import render_for_child
from elasticflow.compiler.plan.torchrun import variables
from elasticflow.errors import ExportError
from elasticflow.protocol.child_processes import SaveRequest
from elasticflow.protocol.json_codec import to_json
from elasticflow.system.installation import module_command

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

_LAST_LINES = 12


def save(job: Job, project_root: Path, weights: Path, folder: Path, tokenizer: str | None) -> None:
    """Write the job's model with these weights into *folder*, by the model's own `save_pretrained`.

    Args:
        job: The job, as the run has recorded it.
        project_root: Folder from which the job's code is imported.
        weights: A safetensors file with all of the model's `state_dict()`.
        folder: Target folder, which does not exist yet.
        tokenizer: Argument of transformers' AutoTokenizer; the tokenizer is saved beside the model. None: no tokenizer.

    Raises:
        ExportError: the model cannot be built, does not fit the snapshot, or has no `save_pretrained`.
    """
    if util.find_spec("torch") is None:
        raise ExportError("--format transformers needs torch", "pip install 'elasticflow[torch]'")
    of_model = [key for key in values_of_data(job).values() if key.startswith("model.")]
    if of_model:
        raise ExportError(
            f"{of_model[0]} comes from the training data, which an export does not open",
            "export it with --format safetensors",
        )
    request = SaveRequest(
        entry_point=render_for_child(job, project_root, call_forms(job, project_root)),
        own=[str((project_root / part).resolve()) for part in job.job.path],
        weights=str(weights.resolve()),
        folder=str(folder.resolve()),
        tokenizer=tokenizer,
    )
    env = {} if job.env is None else job.env.values()
    ended = subprocess.run(
        module_command("elasticflow.runtime.state.save_pretrained"),
        input=to_json(request),
        capture_output=True,
        text=True,
        check=False,
        cwd=project_root.resolve(),
        env={**os.environ, **env, **{each.name: each.value for each in variables(job)}},
    )
    if ended.returncode != 0:
        raise _error(ended)


def _error(ended: subprocess.CompletedProcess[str]) -> ExportError:
    with suppress(ValueError, KeyError, IndexError, TypeError):
        told = json.loads(ended.stdout.splitlines()[-1])
        return ExportError(f"the model cannot be saved: {told['error']}", told["help"])
    last = "\n".join(ended.stderr.splitlines()[-_LAST_LINES:])
    return ExportError(f"the model cannot be saved: its process ended with {ended.returncode}\n{last}")
