"""What is imported before workers are forked, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elasticflow.launcher.agent.agent_process import is_read_early

pytestmark = pytest.mark.usefixtures("real_processes")

ROOT = Path(__file__).parents[3]


def refused_of(folder: Path, modules: dict[str, str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Return what a server that has imported nothing else refuses of *names*, and which of *modules* stay imported."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    program = """if True:
        import json, sys
        from elasticflow.launcher.fork_server import preload
        sys.path.insert(0, sys.argv[1])
        refused = preload.preload(json.loads(sys.argv[2]), [sys.argv[1]])
        kept = [name for name in json.loads(sys.argv[3]) if name in sys.modules]
        print(json.dumps([dict(refused), kept]))
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), json.dumps(names), json.dumps(list(modules))],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    refused, kept = json.loads(done.stdout)
    return refused, kept


def test_what_is_imported_before_a_launch_is_known() -> None:
    """It reads no variables of later libraries: a job that sets any other variable has its fork server started again.

    And a worker's first step imports no compiler: what torch would import there, at each restart, is here already
    (`torch._dynamo`, by its private name).
    """
    program = """if True:
        import json, os, sys
        get, read = type(os.environ).__getitem__, set()
        def watched(self, key):
            frame = sys._getframe(1)
            while frame and "abc" in frame.f_code.co_filename:
                frame = frame.f_back
            # It looks at all names there are.
            if "tqdm" not in frame.f_code.co_filename:
                read.add(key)
            return get(self, key)
        type(os.environ).__getitem__ = watched
        from elasticflow.launcher.fork_server import preload
        list(preload.warm_up())
        print(json.dumps(sorted(read)))
        import torch
        known = set(sys.modules)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        print(json.dumps([name for name in set(sys.modules) - known if "dynamo" in name or "inductor" in name]))
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    read, imported = map(json.loads, done.stdout.splitlines())
    assert "TORCH_LOGS" in read
    assert [] == [name for name in read if not is_read_early(name)]
    assert not any(map(is_read_early, ("HF_HOME", "TOKENIZERS_PARALLELISM", "WANDB_PROJECT", "AWS_PROFILE")))
    assert [] == imported


@pytest.mark.parametrize(
    "reading",
    [
        'os.environ["LOCAL_RANK"]',
        'os.environ.get("LOCAL_RANK", "0")',
        'os.getenv("LOCAL_RANK")',
        '"LOCAL_RANK" in os.environ',
    ],
)
def test_module_that_reads_its_rank_at_import_is_refused(tmp_path: Path, reading: str) -> None:
    """One worker's value, or none, would be frozen for all ranks; the worker imports it instead."""
    refused, kept = refused_of(tmp_path, {"ranked": f"import os\nrank = {reading}\n"}, "ranked")

    assert ["ranked"] == list(refused)
    assert refused["ranked"].startswith(("reads LOCAL_RANK at import", "KeyError"))
    assert [] == kept


def test_what_a_refused_module_imported_of_the_job_is_forgotten_too(tmp_path: Path) -> None:
    """The value is frozen where it was read, which may be a module of the job that the named one imports."""
    modules = {
        "settings": 'import os\nrank = os.environ.get("RANK")\n',
        "model": "import settings\n",
        "data": "pass\n",
    }
    refused, kept = refused_of(tmp_path, modules, "data", "model")

    assert {"model": "reads RANK at import"} == refused
    assert ["data"] == kept


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_module_that_fails_at_import_does_not_end_the_server(tmp_path: Path, code: str, reason: str) -> None:
    """It is refused and the others stay; CPython's own preload swallows one kind and dies of the others."""
    refused, kept = refused_of(tmp_path, {"broken": code, "fine": "pass"}, "broken", "fine")

    assert {"broken": reason} == refused
    assert ["fine"] == kept


def test_module_that_starts_threads_at_import_is_refused(tmp_path: Path) -> None:
    """A forked child has none of its parent's threads, and may wait for them for ever: nothing is forked after that.

    What would have been imported next is not to blame, and would be of no use.
    """
    code = """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    """
    refused, kept = refused_of(tmp_path, {"threaded": code, "fine": "pass"}, "threaded", "fine")

    reason = "starts threads of Python at import: every worker is started anew instead of forked"
    assert {"threaded": reason} == refused
    assert [] == kept


def test_rank_variables_are_read_as_before_after_a_preload(tmp_path: Path) -> None:
    """The watch on the environment is taken away again, also after a module that raises."""
    program = """if True:
        import os, sys
        from elasticflow.launcher.fork_server import preload
        get = type(os.environ).__getitem__
        sys.path.insert(0, sys.argv[1])
        preload.preload(["broken"], [sys.argv[1]])
        sys.exit(type(os.environ).__getitem__ is not get)
    """
    (tmp_path / "broken.py").write_text("1 / 0")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert 0 == done.returncode
