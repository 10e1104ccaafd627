"""A train.py that was edited by hand: finds the edit, and checks that the file still fits the job."""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING

from elasticflow.compiler.launch_folder.launch_record import LaunchRecord, record_in, rendered_again
from elasticflow.compiler.launch_folder.materialize import TRAIN_PY, digest_as_written
from elasticflow.errors import RecordError
from elasticflow.system import records
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.run_folder import RunFolder

# The function that the last line of a generated train.py calls, now and in launches of earlier versions.
_MAIN_CALLS = {"program", "run"}


def edited_entry_point(
    folder: RunFolder,
    project_root: Path,
    differences: Sequence[Difference],
    warn: Callable[[str], None],
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job.

    Raises:
        RecordError: the file is no program that trains, perhaps by mistake.
    """
    numbers = folder.launch_numbers()
    before = folder.launch(numbers[-1]) if numbers else None
    if before is None:
        return None
    path = before / TRAIN_PY
    text = records.read_text(path)
    if text is None:
        warn(f"{path} is absent; it is made anew from the job")
        return None
    if not isinstance(text, Damage) and not _is_edited(before, text, project_root, warn):
        return None
    problem = text.why if isinstance(text, Damage) else _problem_of(text)
    if problem is not None:
        raise RecordError(
            f"{path} {problem}",
            "mend it; or remove it, and the same command makes it anew from the job",
        )
    assert isinstance(text, str)
    if any(difference.is_of_the_job for difference in differences):
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return text


def _is_edited(launch: Path, text: str, project_root: Path, warn: Callable[[str], None]) -> bool:
    """Return whether *text*, train.py in the folder *launch*, differs from the file as it was written."""
    written = digest_as_written(launch)
    if not isinstance(written, Damage):
        return hashlib.sha256(text.encode()).hexdigest() != written
    record = record_in(launch)
    if not isinstance(record, LaunchRecord) or not record.files or record.root is None:
        warn(f"{written}; whether train.py was edited is not known, so it is made anew; it stays in {launch}")
        return False
    warn(f"{written}; train.py is compared with what the job becomes now")
    return text != rendered_again(record, project_root)


def _problem_of(text: str) -> str | None:
    """Return why *text* is no program that trains, as the rest of a sentence; None if it may be one."""
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return f"is no Python: {getattr(error, 'msg', error)} in line {getattr(error, 'lineno', None) or 1}"
    except RecursionError:
        return "is no Python: nested too deeply"
    calls = (node.func for node in ast.walk(program) if isinstance(node, ast.Call))
    if any(getattr(call, "attr", getattr(call, "id", "")) in _MAIN_CALLS for call in calls):
        return None
    return "does not call worker.program, so it trains nothing"
