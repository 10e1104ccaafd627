"""The map of the house: imports go down, in no circle, and torch has its rooms."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import elasticflow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = Path(elasticflow.__file__).parent
# Lowest first; rooms of one floor do not know each other.
FLOORS = (
    {"errors", "events", "run_folder", "guide", "schedules", "metrics", "hugging_face", "lightning", "system", "protocol", "storage"},
    {"python_source"},
    {"jobfile", "snapshots"},
    {"compiler", "scaffold", "lint"},
    {"launcher", "runtime"},
    {"deep", "observe", "clusters"},
    {"deep/child", "doctor", "trials", "report", "sinks"},
    {"cli"},
    {"__main__", ""},  # the package itself offers scripts what lies in rooms below, and no room asks it
)  # fmt: skip
# The worker's side and the launcher's meet in files and messages only.
NEVER = {("runtime", "compiler"), ("runtime", "jobfile"), ("deep", "runtime"), ("trials", "runtime")}
MAY_IMPORT_TORCH = {"runtime", "deep/child"}
MAY_IMPORT_TORCH_IN_FUNCTIONS = {
    "snapshots/tools/export_torch.py",
    "launcher/fork_server/probe.py",
    "schedules.py",  # for job files: any process may import it, a worker calls what is in it
    "hugging_face.py",
    "lightning.py",
}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "templates" not in path.parts
}


def room_of(path: Path) -> str:
    """Return the folder or module right under the package; empty for the package's own `__init__`."""
    parts = path.relative_to(PACKAGE).parts
    if parts[:2] == ("deep", "child"):  # a process of its own, which has torch
        return "deep/child"
    first = parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


class Import(NamedTuple):
    """A module imported somewhere in another: inside functions and for type checkers, too.

    Attributes:
        path: Of the module that imports.
        line: Of the statement.
        name: Full name of what is imported, as far as it is a module.
        is_at_once: It is imported as soon as the module is.
    """

    path: Path
    line: int
    name: str
    is_at_once: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}:{self.line} imports {self.name}"


def imports_of(path: Path) -> Iterator[Import]:
    """Yield everything imported anywhere in a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inner]
        for name in names:
            yield Import(path, getattr(node, "lineno", 0), name, node in tree.body)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """Return all imports of the package."""
    return [each for path in MODULES.values() for each in imports_of(path)]


def test_imports_go_down(imports: list[Import]) -> None:
    """Each import leads to a lower floor or stays in its room; every room has a floor."""
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {room_of(path) for path in MODULES.values()} == set(floors)

    def is_wrong(each: Import) -> bool:
        if each.name not in MODULES:
            return False
        room, other = room_of(each.path), room_of(MODULES[each.name])
        if room == other:
            return False
        is_up = floors[other] > 0 if floors[room] == 0 else floors[other] >= floors[room]
        return is_up or (room, other) in NEVER

    assert [] == [str(each) for each in imports if is_wrong(each)]


def circles(arrows: Iterable[tuple[str, str]]) -> set[str]:
    """Return all that lies in a circle: what is left once whatever has no way in, or no way out, is taken away."""
    left = {(a, b) for a, b in arrows if a != b}
    while True:
        free = {a for a, _ in left} ^ {b for _, b in left}
        if not free:
            return {a for a, _ in left}
        left = {(a, b) for a, b in left if a not in free and b not in free}


def test_nothing_imports_in_a_circle(imports: list[Import]) -> None:
    """No module comes back to itself, nor does any of the rooms and modules of one folder; imports for type checkers counted."""
    arrows = defaultdict(set)
    for each in imports:
        if each.name in MODULES:
            here = each.path.relative_to(PACKAGE).with_suffix("").parts
            there = MODULES[each.name].relative_to(PACKAGE).with_suffix("").parts
            arrows["modules"].add((".".join(here), ".".join(there)))
            for depth, (mine, its) in enumerate(zip(here, there, strict=False)):
                arrows["/".join(("elasticflow", *here[:depth]))].add((mine, its))
                if mine != its:
                    break

    assert {} == {what: found for what, pairs in arrows.items() if (found := circles(pairs))}


def test_a_circle_would_be_found() -> None:
    """Of three in a row and two that know each other, the two."""
    assert {"d", "e"} == circles([("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "d"), ("e", "f")])


def test_torch_has_its_rooms(imports: list[Import]) -> None:
    """Everything but what runs in workers is there, and fast, without torch; no `__init__` loads it."""

    def is_wrong(each: Import) -> bool:
        if each.name.partition(".")[0] != "torch":
            return False
        if str(each.path.relative_to(PACKAGE)) in MAY_IMPORT_TORCH_IN_FUNCTIONS:
            return each.is_at_once
        return room_of(each.path) not in MAY_IMPORT_TORCH or each.path.name == "__init__.py"

    assert [] == [str(each) for each in imports if is_wrong(each)]


def test_the_map_names_every_room() -> None:
    """`elasticflow/README.md` is where a stranger begins."""
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in MODULES.values()} - {"."}

    assert {room for room in rooms if f"`{room}/`" not in text} == set()


@pytest.mark.usefixtures("real_processes")
def test_the_top_level_holds_what_was_asked_for() -> None:
    """Files beside it begin with a dot."""
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    assert [name for name in listed.stdout.split() if not name.startswith(".")] == [
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "elasticflow",
        "examples",
        "jobs",
        "pyproject.toml",
        "tests",
    ]


def test_own_processes_import_nothing_from_the_working_folder() -> None:
    """Every Python process that elasticflow starts has `-P`: a job's `html.py` beside it is not the standard library's."""
    texts = [path.read_text(encoding="utf-8") for path in MODULES.values()]
    starting = [text for text in texts if "sys.executable" in text or "module_command" in text]
    nodes = [node for text in starting for node in ast.walk(ast.parse(text))]
    starts = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.List | ast.Tuple)
        and any(isinstance(each, ast.Constant) and each.value in ("-m", "-c") for each in node.elts)
        and "sys.executable" in ast.unparse(node)
    ]
    # `module_command` is one of these starts.
    by_command = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "module_command"]
    assert len(starts) + len(by_command) > 10
    assert [each for each in starts if "'-P'" not in each] == []


def test_terminal_words_know_no_run(imports: list[Import]) -> None:
    """`observe/` shows runs by `observe/terminal/`, which is below: nothing in there comes back to its loose modules."""
    inner = "elasticflow.observe.terminal"
    back = [
        str(each)
        for each in imports
        if "terminal" in each.path.parts
        and each.name.startswith("elasticflow.observe")
        and not each.name.startswith(inner)
    ]
    assert back == []
