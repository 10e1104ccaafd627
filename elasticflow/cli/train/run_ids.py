"""What runs are called."""

from __future__ import annotations

from elasticflow.errors import CaseError
from elasticflow.run_folder import RUN_ID, new_run_id


def run_id_of(run_id: str | None, case: str | None) -> str:
    """Return the id of a run: of a case it ends in the case's name, so that cases of one id never meet.

    Raises:
        CaseError: it would be too long.
    """
    whole = run_id or new_run_id()
    if case is not None and not whole.endswith(f"-{case}"):
        whole = f"{whole}-{case}"
    if not RUN_ID.fullmatch(whole):
        raise CaseError(f"the run would be called {whole}, and an id has at most 100 letters")
    return whole
