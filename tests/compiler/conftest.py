"""Fixtures of the compiler's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launch folders be written without asking git."""
    monkeypatch.setattr("elasticflow.compiler.materialize.git_state", lambda _: None)
