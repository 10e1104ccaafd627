"""The size and shape of the product, as one row of a table: `python tests/measured/house.py [FOLDER]`.

Lines and functions are those of the modules below `elasticflow/`; templates count. `house.md` has the rows of earlier versions.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Options of the job file, by which the number of product files that a new one touches is told.
SNAPSHOT_OPTIONS = ("staging_limit",)


def lines_of(node: ast.stmt) -> int:
    """Return how many lines a definition has."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def attributes(node: ast.ClassDef) -> int:
    """Return how many attributes a class sets on `self`, or has as fields."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    own = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name) and item.value.id == "self"
    }  # fmt: skip
    return len(fields | own)


def main(root: Path) -> None:
    """Print the figures of the package below *root*."""
    package = root / "elasticflow"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    longest = max(functions, key=lines_of)
    widest = max(classes, key=attributes)
    modules = [path for path in texts if path.name != "__init__.py"]
    rooms = {path.parent for path in modules} - {package}
    sizes = sorted(text.count("\n") for path, text in texts.items() if path in modules)
    figures = {
        "lines": sum(text.count("\n") for text in texts.values()),
        "modules": len(modules),
        "rooms": len(rooms),
        "rooms of fewer than four modules": sum(
            len([path for path in modules if path.parent == room]) < 4 for room in rooms
        ),
        "module: median, p90, largest": f"{statistics.median(sizes):.0f}, {sizes[len(sizes) * 9 // 10]}, {sizes[-1]}",
        "classes": len(classes),
        "functions": len(functions),
        "function: median, largest": f"{statistics.median(map(lines_of, functions)):.0f}, {lines_of(longest)} (`{longest.name}`)",
        "class of most attributes": f"{attributes(widest)} (`{widest.name}`)",
        "`dict[str, Any]`": sum(text.count("dict[str, Any]") for text in texts.values()),
        **{
            f"files that name `{option}`": sum(
                bool(re.search(rf"\b{option}\b", text)) for text in texts.values()
            )
            for option in SNAPSHOT_OPTIONS
        },
    }
    for name, value in figures.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
