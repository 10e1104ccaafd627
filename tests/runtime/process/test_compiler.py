"""torch.compile with a cache of elasticflow's: what a process has ready, and what another one saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticflow.launcher.compiler_cache.node_folder import NodeFolder
from elasticflow.launcher.compiler_cache.transfer import pack, unpack
from elasticflow.protocol.worker_environment import COMPILER_CACHE

PROGRAM = Path(__file__).parents[1] / "programs" / "compile_once.py"
ROOT = Path(__file__).resolve().parents[3]


def _compile(folder: NodeFolder, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            # As the fork server has it: else OpenBLAS starts a thread, of which nobody can tell what it is until it runs.
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder.path),
            COMPILER_CACHE: str(folder.path),
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _sizes(folder: NodeFolder) -> dict[str, int]:
    return {name: state.size for name, state in folder.files().items()}


@pytest.mark.campaign  # half a minute; test_compiled.py has a job that compiles once
@pytest.mark.usefixtures("real_processes")
def test_a_cache_from_elsewhere_saves_the_compilation(tmp_path: Path) -> None:
    """In another folder, as beside the snapshots: nothing is compiled, no file is new, and the value is the same bits.

    The process that was made ready has threads of nobody's and has drawn no random number: it may fork workers.
    """
    first, second = NodeFolder(tmp_path / "first"), NodeFolder(tmp_path / "second")
    (tmp_path / "tmp").mkdir()
    cold = _compile(first)
    sizes = _sizes(first)
    assert (True, 0, 1) == (cold["has_happened"], cold["from_cache"], cold["compiled"])
    assert (None, True) == (cold["unsafe"], cold["has_drawn_nothing"])
    assert any(name.endswith(".so") for name in sizes)

    assert sizes == unpack(pack(first.path, sizes), second.path)
    second.seal(sizes, is_stored=True)
    warm = _compile(second, TMPDIR=str(tmp_path / "tmp"))
    assert (1, 0) == (warm["from_cache"], warm["compiled"])
    assert cold["value"] == warm["value"]
    assert sizes == _sizes(second)
    assert [] == warm["headers"], "150 MB are precompiled for nothing"
    # What is imported late is imported anew by each worker.
    assert [] == [name for name in warm["late"] if "_dynamo" in name]
