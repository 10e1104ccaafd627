"""The floors of the house: a module imports only from floors below, and torch has two rooms."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import elasticflow

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(elasticflow.__file__).parent
FLOORS = {
    **dict.fromkeys(
        (
            "",
            "errors",
            "events",
            "logs",
            "storage",
            "stores",
            "durable",
            "lifeline",
            "records",
            "run_folder",
            "environment",
            "rendezvous_place",
            "etcd_keys",
            "key_store",
            "tcp_keys",
            "secrecy",
            "faults",
            "trajectory",
        ),
        0,
    ),
    "spec": 1,
    "snapshots": 1,
    "compiler": 2,
    "scaffold": 2,
    "launcher": 3,
    "runtime": 3,
    "observe": 4,
    "doctor": 4.5,  # uses the words of observe
    "cli": 5,
    "__main__": 6,
}
# Beside a floor's own room: what the worker's side may not reach, though it lies below.
NEVER = {
    ("runtime", "compiler"),
    ("runtime", "launcher"),
    ("launcher", "runtime"),
    ("spec", "snapshots"),
    ("snapshots", "spec"),
}
# Inside the launcher: who may know whom, lowest first; its own modules, such as `launch`, are "".
LAUNCHER_ROOMS = ("rendezvous", "agent", "supervisor", "", "trials")
# Inside the spec; its own modules are below (the models) or above (`load`) them all.
SPEC_ROOMS = ("findings", "text", "entries", "checks", "cases")
# Intervals like "500 steps" are written in job files and needed by the snapshot policy.
ALLOWED = {("snapshots", "elasticflow.spec.units")}
MAY_IMPORT_TORCH = {"launcher", "runtime"}
MAY_IMPORT_TORCH_IN_FUNCTIONS = {"snapshots/export_torch.py", "launcher/agent/torchrun_arguments.py"}
# The agent is there two seconds sooner without it; its fork server imports it by name.
MAY_NOT_IMPORT_TORCH = {"agent"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)


def room_of(path: Path) -> str:
    """Return the folder or module right under the package; empty for the package's own `__init__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


class Import(NamedTuple):
    """A module imported somewhere in another, inside functions too.

    Attributes:
        path: Of the module that imports, in the package.
        line: Of the statement.
        name: Full name of what is imported.
        is_at_once: It is imported as soon as the module is.
    """

    path: Path
    line: int
    name: str
    is_at_once: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"

    @property
    def room(self) -> str:
        """Of the module that imports."""
        return room_of(PACKAGE / self.path)


def imports_of(path: Path) -> Iterator[Import]:
    """Yield everything imported anywhere in a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = path.relative_to(PACKAGE)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_ours = node.module == "elasticflow"
            names = [f"elasticflow.{alias.name}" for alias in node.names] if is_ours else [node.module]
        for name in names:
            yield Import(own, getattr(node, "lineno", 0), name, node in tree.body)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """Return all imports of the package."""
    return [each for path in MODULES for each in imports_of(path)]


def test_imports_go_down(imports: list[Import]) -> None:
    """Each import leads to a lower floor or stays in its room."""

    def is_wrong(each: Import) -> bool:
        top, _, rest = each.name.partition(".")
        if top != "elasticflow" or (each.room, each.name) in ALLOWED:
            return False
        other = rest.partition(".")[0]
        other = other if other in FLOORS else ""
        floor = FLOORS[each.room]
        is_up = FLOORS[other] >= floor if floor else FLOORS[other] > 0
        return other != each.room and (is_up or (each.room, other) in NEVER)

    assert [] == [str(each) for each in imports if is_wrong(each)]


ROOMS = {"launcher": LAUNCHER_ROOMS, "spec": SPEC_ROOMS}


def test_rooms_of_a_floor_are_entered_one_way(imports: list[Import]) -> None:
    """The agent knows no supervisor, nothing that trains knows of trials, no check knows of cases."""

    def is_wrong(each: Import) -> bool:
        outer, *inner = each.path.parts
        rooms = ROOMS.get(outer, ())
        if not rooms or each.path.name == "__init__.py" or not each.name.startswith(f"elasticflow.{outer}."):
            return False
        if len(inner) == 1 and "" not in rooms:
            return False

        def floor(parts: list[str]) -> int:
            name = parts[0] if len(parts) > 1 or parts[0] in rooms else ""
            return rooms.index(name) if name in rooms else -1

        return floor(each.name.split(".")[2:]) > floor(inner)

    assert [] == [str(each) for each in imports if is_wrong(each)]


def test_torch_is_imported_by_launcher_and_runtime_only(imports: list[Import]) -> None:
    """Everything else works, and stays fast, without torch; no `__init__` loads it."""

    def is_wrong(each: Import) -> bool:
        if each.name.partition(".")[0] != "torch":
            return False
        if str(each.path) in MAY_IMPORT_TORCH_IN_FUNCTIONS:
            return each.is_at_once
        may = each.room in MAY_IMPORT_TORCH and each.path.parent.name not in MAY_NOT_IMPORT_TORCH
        return not may or each.path.name == "__init__.py"

    assert [] == [str(each) for each in imports if is_wrong(each)]


def test_every_room_has_a_floor() -> None:
    """A new folder or ground-floor module is placed on purpose."""
    assert {room_of(path) for path in MODULES} <= set(FLOORS)
