"""The benchmark of many nodes, with eight: its story is told to the end, and what the engine does does not grow too fast."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.measured.benchmarks.scale import measure
from tests.measured.benchmarks.scale_figures import Phase, exponents, growth, keep, kept, table
from tests.measured.benchmarks.scale_picture import drawing

if TYPE_CHECKING:
    from pathlib import Path

TITLES = (
    "all join",
    "first step",
    "steady",
    "snapshot",
    "a node is lost",
    "a node is added",
    "asked to leave",
)


def phases(nodes: int, seconds: float) -> list[Phase]:
    """Return two parts of a launch."""
    return [
        Phase("all join", nodes, seconds, seconds, seconds, requests=nodes, sent=nodes * nodes),
        Phase("snapshot", nodes, 1.0, 0.5, 0.0),
    ]


def test_growth_is_the_exponent_of_the_number_of_nodes() -> None:
    """By least squares; none where there is one number, or nothing was used."""
    assert growth([(64, 1.0), (256, 16.0), (1024, 256.0)]) == pytest.approx(2.0)
    assert growth([(64, 5.0), (1024, 5.0)]) == pytest.approx(0.0)
    assert growth([(64, 5.0)]) is None
    assert growth([(64, 5.0), (256, 0.0)]) is None
    lines = exponents([*phases(10, 1.0), *phases(100, 10.0)])
    assert ["all join: CPU 1.00, requests 1.00, bytes 2.00", "snapshot: CPU 0.00"] == lines


def test_figures_are_kept_by_name_and_number_of_nodes(tmp_path: Path) -> None:
    """What is measured again takes the place of what was there; a table and a picture are made of them."""
    path = tmp_path / "scale.json"
    keep("now", [*phases(100, 10.0), *phases(10, 1.0)], path)
    keep("before", phases(10, 7.0), path)
    keep("now", phases(10, 2.0), path)
    figures = kept(path)

    assert [(10, 4.0), (10, 0.5), (100, 20.0), (100, 0.5)] == [(p.nodes, p.cpu_s) for p in figures["now"]]
    assert "| all join | 100 | 10.0 | 10.00 | 10.00 | 100 | 0.00 | 0.01 |" in table(figures["now"])
    picture = drawing(figures["now"], figures["before"])
    assert 2 == picture.count("<g ")
    assert 4 == picture.count('class="dot"')
    assert 2 == picture.count('class="olddot"')
    assert json.loads(path.read_text())["before"][0]["nodes"] == 10


@pytest.mark.e2e
def test_eight_nodes_join_train_lose_one_take_one_in_and_leave() -> None:
    """With the real supervisor and key server; what they are asked is bounded for each node."""
    told: list[Phase] = []
    measure(8, told, steady_s=0.5)

    assert all(phase.title.startswith(title) for phase, title in zip(told, TITLES, strict=True))
    join, first, _, snapshot, lost, added, _ = told
    assert join.requests < 40 * 8
    assert join.sent < 40_000 * 8
    assert first.requests < 40 * 8
    assert lost.connections < 10 * 8
    assert max(lost.sent, added.sent) < 20_000 * 8
    assert snapshot.operations > 8
