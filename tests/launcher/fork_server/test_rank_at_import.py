"""Libraries that read a worker's rank when they are imported, before there are workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.fork_server import rank_at_import

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
SETTER = """
    import os
    def rank_zero_only(function): ...
    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))
"""


@pytest.fixture
def preloaded(tmp_path: Path, real_processes: None) -> Callable[..., dict[str, str]]:
    """Return what a server refuses of a job's modules that import libraries."""

    def preloaded(libraries: dict[str, str], **job: str) -> dict[str, str]:
        for folder, modules in (("job", job), ("libraries", libraries)):
            for name, code in modules.items():
                path = tmp_path / folder / f"{name.replace('.', '/')}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(textwrap.dedent(code))
        program = """if True:
            import json, sys
            from elasticflow.launcher.fork_server import preload
            print(json.dumps(dict(preload.preload(json.loads(sys.argv[2]), [sys.argv[1] + "/job"]))))
        """
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), json.dumps(list(job))],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}/job:{tmp_path}/libraries"},
        )
        refused: dict[str, str] = json.loads(done.stdout)
        return refused

    return preloaded


@pytest.mark.parametrize(
    "library",
    [
        {"ranked": 'import os\nRANK = int(os.environ.get("RANK", 0))\n'},
        {
            "inner": 'import os\ndef state(): return os.getenv("WORLD_SIZE")\n',
            "ranked": "import inner\ninner.state()\n",
        },
    ],
)
def test_a_library_that_keeps_the_rank_is_in_no_forked_worker(
    preloaded: Callable[..., dict[str, str]], library: dict[str, str]
) -> None:
    """It cannot be imported twice, and before every worker would have had the value of a process without a rank."""
    [(module, reason)] = preloaded(library, model="import ranked\n").items()
    assert module == "model"
    assert reason.startswith(("ranked reads RANK at import", "inner reads WORLD_SIZE at import"))
    assert reason.endswith("every worker is started anew instead of forked")


def test_a_library_that_the_job_asks_for_the_rank_may_keep_it(
    preloaded: Callable[..., dict[str, str]],
) -> None:
    """As a state that is shared by all who ask for it."""
    library = {"state": 'import os\nSEEN = []\ndef rank(): SEEN.append(os.getenv("RANK")); return SEEN[0]\n'}
    assert "state reads RANK at import" in preloaded(library, model="import state\nstate.rank()\n")["model"]


def test_a_library_that_is_told_its_rank_later_is_shared(preloaded: Callable[..., dict[str, str]]) -> None:
    """And so is the module that imports it."""
    # With the packages' own files, else the real torchmetrics would be imported.
    library = {
        "torchmetrics.__init__": "",
        "torchmetrics.utilities.__init__": "",
        "torchmetrics.utilities.prints": SETTER,
    }
    assert preloaded(library, model="import torchmetrics.utilities.prints\n") == {}


def test_a_worker_tells_its_rank_to_the_libraries_that_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, code for rank zero ran on every rank; a library that is not imported, or keeps nothing, is left alone."""
    holders = {
        name: ModuleType(name)
        for name in ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints")
    }
    for name, module in holders.items():
        monkeypatch.setitem(sys.modules, name, module)
        module.rank_zero_only = lambda: None  # type: ignore[attr-defined]
    first, second = (module.rank_zero_only for module in holders.values())
    first.rank = 0
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    rank_at_import.tell_libraries()
    assert first.rank == 5
    assert not hasattr(second, "rank")
    second.rank = 0
    rank_at_import.tell_libraries()
    assert (first.rank, second.rank) == (5, 1)
