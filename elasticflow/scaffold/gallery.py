"""Whole examples, each a small project of its own: `elasticflow init --example NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.diagnostics.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JOB_FILE = "job.toml"
# In an installed package, the folder of examples/hatch_build.py; in a checkout, the examples themselves.
_FOLDERS = (Path(__file__).parent / "examples", Path(__file__).parents[2] / "examples")


def examples() -> Mapping[str, str]:
    """Return a few words about each example, by its name."""
    return {folder.name: _about(folder) for folder in _folders()}


def files_of(name: str) -> Mapping[str, bytes]:
    """Return the files of an example by their names.

    Raises:
        ScaffoldError: there is no example of that name.
    """
    folders = {folder.name: folder for folder in _folders()}
    if name not in folders:
        near = nearest(name, folders)
        remedy = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(folders)}"
        raise ScaffoldError(f'there is no example "{name}"', remedy)
    # Folders inside are left over from runs.
    paths = (path for path in sorted(folders[name].iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith(".")}


def text_of_file(name: str) -> str:
    """Return a file of the examples by its path below their folder.

    Raises:
        ScaffoldError: the installation lacks the file.
    """
    for root in _FOLDERS:
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8")
    raise ScaffoldError(f"this installation has no examples/{name}", "install elasticflow again")


def _folders() -> Iterator[Path]:
    root = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return iter(()) if root is None else (path.parent for path in sorted(root.glob(f"*/{JOB_FILE}")))


def _about(folder: Path) -> str:
    """Return the text after the name in the heading of an example's README."""
    with (folder / "README.md").open(encoding="utf-8") as lines:
        return lines.readline().partition(": ")[2].strip()
