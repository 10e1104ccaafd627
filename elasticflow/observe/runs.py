"""Lists the runs of a project, and finds the one that a command's RUN means."""

from __future__ import annotations

import difflib
from pathlib import Path

from elasticflow.errors import RunNotFoundError
from elasticflow.observe.history import state_of
from elasticflow.run_folder import RUN_ID, RUNS, RunFolder


def list_runs(project_root: Path, job: str | None = None) -> list[RunFolder]:
    """Return the runs under *project_root*, of one job if it is named, the newest launch first."""
    runs = project_root / RUNS
    if not runs.is_dir():
        return []
    folders = [
        RunFolder(path)
        for of_job in runs.iterdir()
        if of_job.is_dir() and job in {None, of_job.name}
        for path in of_job.iterdir()
        if _is_run(path)
    ]
    return sorted(folders, key=lambda f: (_started(f), f.run_id, f.job), reverse=True)


def find_run(project_root: Path, text: str | None) -> RunFolder:
    """Return the run that *text* means: a run folder, a run id, or a job's name or file (its newest run).

    Without a text, the newest run of the project is meant.

    Raises:
        RunNotFoundError: there is none, or an id that two jobs use.
    """
    if text is not None and text.endswith(".toml") and Path(text).is_file():
        return _find_run_of_file(Path(text))
    runs = list_runs(project_root)
    folder = project_root / RUNS
    if text is None:
        if not runs:
            raise RunNotFoundError(f"there are no runs in {folder}", "start one: elasticflow run JOB.toml")
        return runs[0]
    if "/" in text or Path(text).is_dir():
        path = Path(text).absolute()
        if _is_run(path):
            return RunFolder(path)
    by_id = [run for run in runs if run.run_id == text]
    if len(by_id) > 1:
        folders = ", ".join(str(run.path) for run in by_id)
        raise RunNotFoundError(f'"{text}" is the id of {len(by_id)} runs: {folders}', "give the run's folder")
    matches = by_id or [run for run in runs if run.job == text]
    if not matches:
        raise RunNotFoundError(f'no run "{text}" in {folder}', _remedy(text, runs))
    return matches[0]


def _find_run_of_file(path: Path) -> RunFolder:
    from elasticflow.jobfile.load import has_matrix, require_cases, require_job

    # Only names are asked for: variables need not be set here.
    loaded_jobs = (
        require_cases(path, environment=None) if has_matrix(path) else [require_job(path, environment=None)]
    )
    names = {loaded.job.job.name for loaded in loaded_jobs if loaded.job is not None}
    root = loaded_jobs[0].project_root
    newest = next((run for run in list_runs(root) if run.job in names), None)
    return newest or find_run(root, min(names))


def is_finished(folder: RunFolder) -> bool:
    """Return whether training reached its end; False for a run that does not exist."""
    return state_of(folder).status == "finished"


def newest_resumable(project_root: Path) -> RunFolder | None:
    """Return the newest run that is not finished, or None.

    A run that is running counts: to go on with an older one instead would surprise whoever typed `resume`.
    """
    return next(
        (run for run in list_runs(project_root) if run.launch_numbers() and not is_finished(run)), None
    )


def _is_run(path: Path) -> bool:
    if RUN_ID.fullmatch(path.name) is None:
        return False
    return any((path / name).exists() for name in ("state.json", "events.jsonl", "launches"))


def _started(folder: RunFolder) -> float:
    return state_of(folder).started or folder.path.stat().st_mtime


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
