"""Bytecode of tests' modules, which two processes of pytest-xdist write together in a fresh clone.

Rewriting the assertions of all modules takes 20 s of CPU, and both processes begin with the first of them, at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from _pytest.assertion import rewrite

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def write_from_the_end(folder: Path, config: pytest.Config) -> list[Path]:
    """Write the bytecode of the test modules below *folder*, from the last one on up to one that has it; return the modules.

    Source: pytest 9, _pytest/assertion/rewrite.py, `AssertionRewritingHook.exec_module`.
    """
    written: list[Path] = []
    for module in sorted(folder.rglob("test_*.py"), reverse=True):
        cached = rewrite.get_cache_dir(module) / (module.stem + rewrite.PYC_TAIL)
        if cached.exists():
            break
        status, code = rewrite._rewrite_test(module, config)
        cached.parent.mkdir(exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, cached)
        written.append(module)
    return written
