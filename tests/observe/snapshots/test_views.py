"""Snapshots as table, page and tree, from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import pytest

from elasticflow.cli.snapshots.list import notes, summary, table_of
from elasticflow.observe.snapshots.lineage import LineageGeneration, draw
from elasticflow.observe.snapshots.page import page, tensors_by_prefix
from elasticflow.observe.snapshots.rows import SnapshotRow
from elasticflow.protocol.snapshot_settings import Keep
from elasticflow.snapshots.format.manifest import FileEntry, Manifest
from elasticflow.snapshots.format.pieces import TensorPlace

NOW = 2000.0
SHARD = "shard-00000-of-00001.safetensors"


def row(step: int, generation: int = 1, **changes: Any) -> SnapshotRow:
    """Return the row of a committed snapshot of 80 kB."""
    name = f"{step:012d}-{generation:04d}-{step:08x}"
    about = changes.pop("about", {})
    manifest = Manifest(
        run_id="r",
        name=name,
        step=step,
        generation=generation,
        world_size=2,
        trigger="steps",
        created=NOW - 60,
        files={SHARD: FileEntry(80_000, (1,))},
        tensors={"model/w": TensorPlace(SHARD, "F32", (100, 200), 100, 80_000)},
        epoch=1,
        samples=64 * step,
    )
    return SnapshotRow(
        **{"name": name, "state": "committed", "manifest": replace(manifest, **about), **changes}
    )


ROWS = [row(1200, kept=("newest", "last")), row(1000, kept=("every",), about={"metric": 0.5})]
BAD = [
    row(900, state="set aside", reason="shard: is absent"),
    SnapshotRow("000000000800-0001-00000320", "unfinished", "being written"),
]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (None, "SNAPSHOT STEP EPOCHS SAMPLES SIZE AGE GEN WORKERS TRIGGER METRIC KEPT STATE"),
        (140, "SNAPSHOT STEP EPOCHS SAMPLES SIZE AGE GEN WORKERS TRIGGER METRIC KEPT STATE"),
        (80, "SNAPSHOT STEP SIZE AGE METRIC KEPT"),
        (60, "SNAPSHOT STEP AGE KEPT"),
        (10, "SNAPSHOT AGE KEPT"),
    ],
)
def test_columns_that_do_not_fit_are_left_out(width: int | None, columns: str) -> None:
    """The least telling go first; a state that all share goes before them."""
    header, *_ = map(click.unstyle, table_of(ROWS, NOW, width))
    assert columns == " ".join(header.split())
    assert width in {None, 10} or len(header) <= width


def test_a_state_that_differs_is_never_left_out() -> None:
    """What cannot be restored is told at any width."""
    for width in (None, 80, 20):
        header, *lines = map(click.unstyle, table_of([*ROWS, *BAD], NOW, width))
        assert header.endswith("STATE")
        assert ["committed", "committed", "set aside", "unfinished"] == [
            line.rpartition("  ")[2] for line in lines
        ]


def test_what_a_table_has_no_room_for() -> None:
    """Reasons and notes of pins stand below it; the summary counts by state."""
    pinned = replace(ROWS[1], kept=("pinned",), note="for the paper")
    assert notes([ROWS[0], pinned, *BAD]) == [
        f"{BAD[0].name}  set aside: shard: is absent",
        f"{BAD[1].name}  unfinished: being written",
        f"{pinned.name}  pinned: for the paper",
    ]
    assert "2 snapshots, 160.0 kB, 1 set aside, 1 unfinished" == summary([*ROWS, *BAD])
    assert "0 snapshots" == summary([])


def test_tensors_are_summed_by_part_and_dtype() -> None:
    """One line for each, whatever the number of tensors."""
    places = {
        "model/a": TensorPlace(SHARD, "F32", (2,), 0, 8),
        "model/b": TensorPlace(SHARD, "F32", (3,), 8, 12),
        "model/c": TensorPlace(SHARD, "BF16", (2,), 20, 4),
        "optimizer/state/0/exp_avg": TensorPlace(SHARD, "F32", (2,), 24, 8),
    }
    manifest = row(1, about={"tensors": places}).manifest
    assert manifest is not None
    assert [
        ("model", "BF16", 1, 4),
        ("model", "F32", 2, 20),
        ("optimizer", "F32", 1, 8),
    ] == tensors_by_prefix(manifest)


def test_page_tells_what_is_borrowed_tied_and_laid_out() -> None:
    """Facts that most snapshots lack stand there when they are."""
    lender = row(900).name
    about = {
        "borrowed": {f"{lender}/frozen.safetensors": FileEntry(5_000, (1,), "ab" * 32)},
        "aliases": {"model/head": "model/w"},
        "memory_formats": {"model/conv": "channels_last"},
        "parent": lender,
    }
    lines = page(row(1000, about=about, kept=("last",)), Keep(), NOW)
    assert f"borrowed    5.0 kB of tensors unchanged since, from {lender}" in lines
    assert "aliases     model/head is model/w" in lines
    assert "layouts     model/conv: channels_last" in lines
    assert f"parent      {lender}" in lines
    assert any(each.endswith(f"sha256 {'ab' * 32}") for each in lines)


def test_page_says_when_nothing_keeps_a_snapshot() -> None:
    """Or that nobody knows."""
    assert "kept        no rule keeps it" in page(row(1), Keep(), NOW)
    assert "kept        not known: no job is recorded there" in page(row(1), None, NOW)


def plain(found: list[LineageGeneration], rows: list[SnapshotRow], shown: str) -> list[str]:
    """Return the drawing without what is marked."""
    return [text for text, _ in draw(found, rows, shown, plain=True)]


def test_of_many_generations_those_around_the_shown_one_are_drawn() -> None:
    """Two hundred restarts stay readable."""
    rows = [row(10 * number, number) for number in range(1, 201)]
    found = [LineageGeneration(number, snapshots=(rows[number - 1],)) for number in range(1, 201)]
    text = plain(found, rows, rows[99].name)
    assert "... 89 earlier generations" == text[0]
    assert "... 91 later generations" == text[-1]
    assert 2 + 2 * 20 == len(text)
    assert "generation 1  from the beginning" == plain(found, rows, rows[0].name)[0]
    assert "generation 200" == plain(found, rows, rows[-1].name)[-2]


def test_of_many_snapshots_the_newest_and_the_shown_one_are_drawn() -> None:
    """The others are counted."""
    rows = [row(step) for step in range(10, 500, 10)]
    text = draw([LineageGeneration(1, snapshots=tuple(rows))], rows, rows[0].name, plain=True)
    assert [True] == [is_shown for line, is_shown in text if "step 10 " in line]
    assert "|-- 40 snapshots more" == text[1][0]
    assert "`-- step 490" == text[-1][0][:12]
    assert 1 + 1 + 1 + 8 == len(text)


def test_a_state_in_memory_is_where_a_generation_began() -> None:
    """Not the snapshot before it."""
    began = LineageGeneration(2, reason="crash", world_size=1, parent=row(20).name, memory_step=24)
    assert "generation 2  1 worker, crash, from step 24 in memory" == draw([began], [], "")[0][0]


def test_a_parent_that_is_gone() -> None:
    """Retention may have removed what a generation resumed from."""
    rows = [row(30, 2)]
    found = [
        LineageGeneration(
            2, launch=2, reason="resume", world_size=1, parent=row(20).name, snapshots=tuple(rows)
        )
    ]
    assert plain(found, rows, rows[0].name)[0] == (
        f"generation 2  1 worker, resume, from step 20 ({row(20).name}, since removed), launch 2"
    )


def test_the_shown_one_has_an_arrow() -> None:
    """Between the others and at the end, with lines or with ASCII."""
    rows = [row(10), row(20)]
    found = [LineageGeneration(1, snapshots=tuple(rows))]
    assert ["├─▶", "└──"] == [text[:3] for text, _ in draw(found, rows, rows[0].name)][1:]
    assert ["|--", "`->"] == [text[:3] for text, _ in draw(found, rows, rows[1].name, plain=True)][1:]
