"""Lists the runs of a project, and finds the run that a command's RUN means."""

from __future__ import annotations

import difflib
from pathlib import Path

from elasticflow.errors import RunNotFoundError
from elasticflow.observe.by_hand import RunByHand, was_started_by_hand
from elasticflow.observe.history import state_of
from elasticflow.run_folder import RUN_ID, RUNS, RunFolder


def list_runs(project_root: Path, job: str | None = None, *, by_hand: bool = False) -> list[RunFolder]:
    """Return the runs under *project_root*, or of one job in it, the newest launch first.

    Args:
        job: Name of a job; None: all jobs.
        by_hand: Include runs that plain python or torchrun started (`RunByHand`).
    """
    runs = project_root / RUNS
    if not runs.is_dir():
        return []
    folders = [
        folder
        for of_job in runs.iterdir()
        if of_job.is_dir() and job in {None, of_job.name}
        for path in of_job.iterdir()
        if (folder := _run_at(path, by_hand=by_hand)) is not None
    ]
    return sorted(
        folders, key=lambda f: (state_of(f).launched or f.path.stat().st_mtime, f.run_id, f.job), reverse=True
    )


def find_run(project_root: Path, text: str | None, *, by_hand: bool = False) -> RunFolder:
    """Return the run that *text* means: a run folder, a run id, or a job's name or file (its newest run).

    None means the newest run of the project.

    Args:
        text: RUN as the user typed it.
        by_hand: True if the command can also show a run that plain python or torchrun started (`RunByHand`).

    Raises:
        RunNotFoundError: there is no such run, or two jobs have a run of this id; or the command needs a supervisor's
            records, and the run has none.
    """
    if text is not None and text.endswith(".toml") and Path(text).is_file():
        return _find_run_of_file(Path(text))
    if text is not None and ("/" in text or Path(text).is_dir()):
        found = _run_at(Path(text).absolute(), by_hand=True)
        if found is not None and (by_hand or not isinstance(found, RunByHand)):
            return found
        if found is not None:
            raise _no_supervisor(text)
    runs, folder = list_runs(project_root, by_hand=by_hand), project_root / RUNS
    by_id = [run for run in runs if run.run_id == text]
    if len(by_id) > 1:
        folders = ", ".join(str(run.path) for run in by_id)
        raise RunNotFoundError(f'"{text}" is the id of {len(by_id)} runs: {folders}', "give the run's folder")
    if matches := by_id or [run for run in runs if text in {None, run.job}]:
        return matches[0]
    others = [] if by_hand else list_runs(project_root, by_hand=True)
    if others := [run for run in others if text in {None, run.run_id, run.job}]:
        raise _no_supervisor(text or others[0].job)
    raise _not_found(text, folder, runs)


def _find_run_of_file(path: Path) -> RunFolder:
    from elasticflow.jobfile.load import has_matrix, require_cases, require_job

    # Only names are needed, so environment variables need not be set.
    loaded_jobs = (
        require_cases(path, environment=None) if has_matrix(path) else [require_job(path, environment=None)]
    )
    names = {loaded.job.job.name for loaded in loaded_jobs}
    root = loaded_jobs[0].project_root
    newest = next((run for run in list_runs(root) if run.job in names), None)
    return newest or find_run(root, min(names))


def is_finished(folder: RunFolder) -> bool:
    """Return True if training reached its end; False for a run that does not exist."""
    return state_of(folder).status == "finished"


def way_to_train_on(folder: RunFolder, run: str) -> str:
    """Return how a finished run is trained on, as the end of a sentence; empty if a script, or its own code, has ended it.

    Args:
        run: The word by which commands find the run.
    """
    state = state_of(folder)
    if state.script is not None or (state.verdict or {}).get("stopped"):
        return ""
    return f"; elasticflow resume {run} --set train.epochs=N, or train.steps=N, trains this one longer"


def newest_resumable(project_root: Path) -> RunFolder | None:
    """Return the newest run that is not finished, or None.

    A running run counts: `resume` with an older run instead would surprise the user.
    """
    return next(
        (run for run in list_runs(project_root) if run.launch_numbers() and not is_finished(run)), None
    )


def _run_at(path: Path, *, by_hand: bool) -> RunFolder | None:
    if RUN_ID.fullmatch(path.name) is None:
        return None
    if any((path / name).exists() for name in ("state.json", "events.jsonl", "launches")):
        return RunFolder(path)
    return RunByHand(path) if by_hand and was_started_by_hand(path) else None


def _no_supervisor(text: str) -> RunNotFoundError:
    return RunNotFoundError(
        f'"{text}" was started without `elasticflow run`: no supervisor leads it, and no job is recorded',
        "status, metrics, logs, why, report and snapshots show it; the command that started it continues with it",
    )


def _not_found(text: str | None, folder: Path, runs: list[RunFolder]) -> RunNotFoundError:
    # A machine that takes part in a run, and does not see the leader's folder, has the files of its own node there.
    for path in folder.glob("*/*/nodes"):
        if text in {None, path.parent.name, path.parent.parent.name}:
            return RunNotFoundError(
                f"run {path.parent.name} is led by another machine: here are only the logs of this machine's workers",
                "give the command on the machine that leads it",
            )
    if text is None:
        return RunNotFoundError(f"there are no runs in {folder}", "start one: elasticflow run JOB.toml")
    return RunNotFoundError(f'no run "{text}" in {folder}', _remedy(text, runs))


def _remedy(text: str, runs: list[RunFolder]) -> str:
    if not runs:
        return "there are no runs yet; start one: elasticflow run JOB.toml"
    if text.endswith(".toml"):
        return "there is no such file; give the job's name"
    names = sorted({run.job for run in runs}) + [run.run_id for run in runs]
    near = difflib.get_close_matches(text, names, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"give a run folder, a run id or a job's name, such as {names[0]}; `elasticflow runs` lists them"
