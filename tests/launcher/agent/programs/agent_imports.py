"""What an agent imports between a failure and the next generation; run alone, since other tests import nearly everything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.launcher.agent.test_agent import node, temporary  # noqa: F401  # fixtures

if TYPE_CHECKING:
    from tests.launcher.agent.test_agent import Node

pytestmark = pytest.mark.usefixtures("real_processes")


def test_nothing_is_imported(node: Node) -> None:  # noqa: F811  # the fixture
    """A crash with an error file, then a group that leaves by itself."""
    node.form(1, "raise ValueError('label 11 is no digit')")
    before = set(sys.modules)
    assert node.ended(1)[0]
    node.form(2, "os._exit(0)")
    assert not node.ended(2)[0]

    assert set() == set(sys.modules) - before
