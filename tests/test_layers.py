"""The floors of the house: a module imports only from floors below, and torch has two rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elasticflow

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


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of everything imported anywhere in a module, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [
                (node.lineno, name) for name in (names if node.module == "elasticflow" else [node.module])
            ]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    """Each import leads to a lower floor or stays in its room."""
    room, wrong = room_of(path), []
    for line, name in imports_of(path):
        top, _, rest = name.partition(".")
        if top != "elasticflow":
            continue
        other = rest.partition(".")[0]
        other = other if other in FLOORS else ""
        is_up = FLOORS[other] >= FLOORS[room] if FLOORS[room] else FLOORS[other] > 0
        if (room, name) in ALLOWED:
            continue
        if other != room and (is_up or (room, other) in NEVER):
            wrong.append(f"line {line}: {name}")
    assert wrong == []


ROOMS = {"launcher": LAUNCHER_ROOMS, "spec": SPEC_ROOMS}
IN_ROOMS = [
    path
    for path in MODULES
    if path.name != "__init__.py"
    and (parts := path.relative_to(PACKAGE).parts)[0] in ROOMS
    and (len(parts) > 2 or "" in ROOMS[parts[0]])
]


@pytest.mark.parametrize("path", IN_ROOMS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_of_a_floor_are_entered_one_way(path: Path) -> None:
    """The agent knows no supervisor, nothing that trains knows of trials, no check knows of cases."""
    outer, *inner = path.relative_to(PACKAGE).parts
    rooms = ROOMS[outer]

    def floor(parts: list[str]) -> int:
        name = parts[0] if len(parts) > 1 or parts[0] in rooms else ""
        return rooms.index(name) if name in rooms else -1

    others = [
        (line, name.split(".")[2:])
        for line, name in imports_of(path)
        if name.startswith(f"elasticflow.{outer}.")
    ]
    assert [] == [f"line {line}: {'.'.join(parts)}" for line, parts in others if floor(parts) > floor(inner)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_is_imported_by_launcher_and_runtime_only(path: Path) -> None:
    """Everything else works, and stays fast, without torch; no `__init__` loads it."""
    found = [f"line {line}" for line, name in imports_of(path) if name.partition(".")[0] == "torch"]
    if str(path.relative_to(PACKAGE)) in MAY_IMPORT_TORCH_IN_FUNCTIONS:
        at_once = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        found = [each for each in found if any(each == f"line {node.lineno}" for node in at_once)]
    may = room_of(path) in MAY_IMPORT_TORCH and path.parent.name not in MAY_NOT_IMPORT_TORCH
    assert found == [] or (may and path.name != "__init__.py")


def test_every_room_has_a_floor() -> None:
    """A new folder or ground-floor module is placed on purpose."""
    assert {room_of(path) for path in MODULES} <= set(FLOORS)
