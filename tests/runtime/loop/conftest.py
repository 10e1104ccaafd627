"""Scripts under plain python, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.forked import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.forked import ForkedPrograms

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LIMIT_S = 120.0


@pytest.fixture
def plain_python(tmp_path: Path, forked: ForkedPrograms) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a script in the test's folder, to a good end: in a fork, which has imported torch."""

    def run(script: str | Path, *words: str) -> subprocess.CompletedProcess[str]:
        program = forked.start(tmp_path / script, *words, environment=ENVIRONMENT, cwd=tmp_path)
        try:
            code = program.wait(LIMIT_S)
        finally:
            program.kill()
        outputs = program.stdout.read_text(), program.stderr.read_text()
        assert code == 0, outputs[1]
        return subprocess.CompletedProcess([str(script), *words], code, *outputs)

    return run


@pytest.fixture
def own_interpreter(real_processes: None, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a script in the test's folder, to a good end: in an interpreter of its own, to the interpreter's end."""

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
