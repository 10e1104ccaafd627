"""What hooks logged, read back: every point once, whatever was done again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.points import FOLDER, file_name, read_points
from elasticflow.runtime.loop.context import PointWriter

if TYPE_CHECKING:
    from pathlib import Path


def facts(step: int, hook: str = "on_step") -> dict[str, Any]:
    """Return what each point of a call has."""
    return {"step": step, "epoch": 1, "hook": hook}


def writer(folder: Path, generation: int, step: int, rank: int = 0) -> PointWriter:
    """Return the writer of a generation that continues after *step*."""
    made = PointWriter(folder, generation, rank)
    made.begin(step)
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), max_size=6),
    st.integers(1, 2),
)
def test_any_kills_leave_each_point_once(
    tmp_path_factory: Any, kills: list[tuple[int, int]], points_of_a_call: int
) -> None:
    """Each generation resumes from the newest of its snapshots (every third step) and dies after so many steps.

    It may die within a call: some of its points are there then.
    """
    folder: Path = tmp_path_factory.mktemp("run")
    saved, number = 0, 0
    for number, (steps, torn) in enumerate([*kills, (20, 9)], 1):
        made = writer(folder, number, saved)
        made.add("text", "begin", str(number), facts(saved, "on_start"))
        for step in range(saved + 1, min(saved + steps, 20) + 1):
            is_last = number <= len(kills) and step == saved + steps
            for n in range(min(points_of_a_call, torn) if is_last else points_of_a_call):
                made.add("scalar", f"s{n}", step + number / 1000, facts(step))
            if not is_last and step % 3 == 0:
                made.sync()
        reached = min(saved + steps, 20)
        last_whole = reached - 1 if number <= len(kills) else reached
        saved = max(saved, last_whole // 3 * 3)
    points = [p for p in read_points(folder) if p["kind"] == "scalar"]
    expected = [(step, f"s{n}") for step in range(1, 21) for n in range(points_of_a_call)]
    assert [(p["step"], p["name"]) for p in points] == expected
    begins = [(p["step"], p["value"]) for p in read_points(folder) if p["kind"] == "text"]
    assert len({step for step, _ in begins}) == len(begins)
    assert begins[-1][1] == str(number)


def test_a_call_that_is_made_again_counts_for_the_one_before(tmp_path: Path) -> None:
    """As after a kill in on_finish: what the first try logged, and the second did not, is gone."""
    first = writer(tmp_path, 1, 0)
    for name in ("a", "b"):
        first.add("scalar", name, 1.0, facts(9, "on_finish"))
    writer(tmp_path, 2, 9).add("scalar", "a", 2.0, facts(9, "on_finish"))
    assert [(p["name"], p["value"]) for p in read_points(tmp_path)] == [("a", 2.0)]


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    """And a torn line hides no other."""
    for rank in (0, 1):
        writer(tmp_path, 1, 0, rank).add("scalar", "a", float(rank), facts(1))
    with (tmp_path / FOLDER / file_name(1, 1)).open("ab") as file:
        file.write(b'{"step": 2, "na')
    assert [(p["rank"], p["value"]) for p in read_points(tmp_path)] == [(0, 0.0), (1, 1.0)]


def test_an_image_takes_the_place_of_one_of_the_same_step(tmp_path: Path) -> None:
    """There is no other file, and the point names it as the run folder has it."""
    for generation in (1, 2):
        made = writer(tmp_path, generation, 0)
        made.add_image("samples/grid", b"png %d" % generation, facts(4, "on_evaluation"))
    (point,) = read_points(tmp_path)
    assert point["value"] == "logged/images/000000004-on_evaluation-samples.grid.png"
    assert (tmp_path / point["value"]).read_bytes() == b"png 2"
    assert [path.name for path in (tmp_path / FOLDER / "images").iterdir()] == [
        (tmp_path / point["value"]).name
    ]


def test_a_run_without_hooks_has_none(tmp_path: Path) -> None:
    """Nor a folder for them."""
    assert read_points(tmp_path) == []
