from __future__ import annotations

import re

import pytest
import tomli

from elasticflow.system.installation import torch_requirement, untried_torch
from tests.fenced_blocks import ROOT


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [
        ("2.13.0+cpu", True),
        ("2.14.1", True),
        ("2.15.0", True),
        ("2.16.0", False),
        ("2.1.3", False),
        ("3.0.0a0+gitabc", False),
    ],
)
def test_a_version_never_tried_is_a_sentence(version: str, *, is_tried: bool) -> None:
    """By its minor version, whatever is built into it."""
    sentence = (
        f"torch {version} has not been tried with this version of elasticflow; 2.13, 2.14 and 2.15 have"
    )
    assert (None if is_tried else sentence) == untried_torch(version)


def test_the_extra_and_the_constraints_are_of_that_range() -> None:
    """The extra allows what was tried; README's commands take one of those, which has a build without CUDA."""
    extra = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["torch"]
    assert torch_requirement() in extra
    assert "torch>=2.13,<2.16" == torch_requirement()
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "tests" / "constraints.txt").read_text(), re.MULTILINE)
    assert untried_torch(pinned) is None


def test_what_is_installed_from_a_clone_is_constrained() -> None:
    """A machine without a GPU gets none of CUDA's packages; CI installs by README's commands alone."""
    commands = re.findall(r"pip install [^\n]*-e [^\n]*", (ROOT / "README.md").read_text())
    assert 2 == len(commands)
    assert all("-c tests/constraints.txt " in command for command in commands)
    assert "pip install" not in (ROOT / ".ci" / "run").read_text()
