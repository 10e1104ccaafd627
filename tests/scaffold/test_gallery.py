"""The gallery: what is in it, and that an installed package has it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
import pytest

from elasticflow.cli.write.init import command
from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.load import load_job
from elasticflow.lint.rungs import TEMPLATES
from elasticflow.scaffold import gallery
from tests.fenced_blocks import blocks, commands

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
NAMES = [
    *("contrastive", "dcgan", "detection", "diffusion", "gpt", "graphs"),
    *("images", "lora", "segmentation", "streaming", "tabular"),
]


def test_help_names_every_example() -> None:
    """`init --help` lists them, and nothing else."""
    text = click.Context(command).get_help()
    assert sorted(gallery.examples()) == NAMES
    assert all(f" {name} " in text.replace("\n", " ") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_whole(name: str) -> None:
    """A project with a valid job of its name, a page of some ten lines that says what it is, and no large file."""
    files = gallery.files_of(name)
    assert {"README.md", "job.toml", "pyproject.toml", f"{name}.py"} <= files.keys()
    assert gallery.examples()[name]
    assert len(files["README.md"].splitlines()) <= 14
    assert sum(map(len, files.values())) < 120_000
    loaded = load_job(ROOT / "examples" / name / "job.toml")
    assert [each for each in loaded.diagnostics if each.severity == "error"] == []
    assert loaded.job.job.name == name
    assert loaded.project_root == ROOT / "examples" / name


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_says_to_set_can_be_set(name: str) -> None:
    """The keys of its commands are the job's, and their values fit."""
    folder = ROOT / "examples" / name
    typed = [line for block in blocks() if block.page.parent == folder for line in commands(block)]
    assert any(line.startswith("elasticflow run job.toml") for line in typed)
    for line in typed:
        words = shlex.split(line, comments=True)
        sets = [value for option, value in pairwise(words) if option == "--set"]
        loaded = load_job(folder / "job.toml", sets)
        assert [each.message for each in loaded.diagnostics if each.severity == "error"] == [], line


def test_what_runs_have_left_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither folders nor hidden files."""
    for name in ("runs/x/state.json", ".gitignore", "job.toml", "README.md"):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# mine: an example\n")
    monkeypatch.setattr(gallery, "_FOLDERS", (tmp_path / "none", tmp_path))
    assert {"mine": "an example"} == gallery.examples()
    assert {"README.md", "job.toml"} == gallery.files_of("mine").keys()
    with pytest.raises(ScaffoldError, match='there is no example "gpt"'):
        gallery.files_of("gpt")


@pytest.fixture
def build_hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Return examples/hatch_build.py's hook, which hatchling makes with the project's root; hatchling is not here."""

    class Interface:
        def __class_getitem__(cls, item: object) -> type[Interface]:
            return cls

        def __init__(self, root: Path) -> None:
            self.root = str(root)

    name = "hatchling.builders.hooks.plugin.interface"
    module = ModuleType(name)
    vars(module)["BuildHookInterface"] = Interface
    monkeypatch.setitem(sys.modules, name, module)
    for parent in (
        "hatchling",
        "hatchling.builders",
        "hatchling.builders.hooks",
        "hatchling.builders.hooks.plugin",
    ):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "examples" / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    made: Callable[[Path], Any] = hook.ExamplesHook
    return made


def test_a_wheel_holds_what_init_writes(build_hook: Callable[[Path], Any], tmp_path: Path) -> None:
    """Installed, the same files are found; an editable install takes none along."""
    added: dict[str, Any] = {"force_include": {}}
    build_hook(ROOT).initialize("standard", added)
    placed = {place: Path(path) for path, place in added["force_include"].items()}
    package = Path(gallery.__file__).parents[2]
    found = {
        f"{gallery._FOLDERS[0].relative_to(package)}/{name}/{file}": content
        for name in NAMES
        for file, content in gallery.files_of(name).items()
    }
    folder = gallery._FOLDERS[0].relative_to(package)
    found |= {f"{folder}/{name}": gallery.text_of_file(name).encode() for name in TEMPLATES.values()}
    assert found.items() <= {place: path.read_bytes() for place, path in placed.items()}.items()
    # Beside them only what the scripts of the templates import.
    assert {place.split("/")[-2] for place in placed.keys() - found.keys()} <= {"own_loop", "rungs"}
    editable: dict[str, Any] = {"force_include": {}}
    build_hook(ROOT).initialize("editable", editable)
    assert editable == {"force_include": {}}
