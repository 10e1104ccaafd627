"""Read the names that other tools give their options out of their sources, and write `names.json` again.

`pip download --no-deps` the packages below, unpack each wheel into a folder named like it, and name the folder above:
`python tests/jobfile/tools/read_names.py FOLDER`.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

NAMES = Path(__file__).with_name("names.json")
# Tool, package, version -> file, class: its annotated fields, or the parameters of its `__init__`; "*": all classes.
SOURCES = [
    ("hf", "transformers", "5.23.0", "transformers/training_args.py", "TrainingArguments"),
    ("hf", "transformers", "4.57.1", "transformers/training_args.py", "TrainingArguments"),
    ("lightning", "lightning", "2.6.6", "lightning/pytorch/trainer/trainer.py", "Trainer"),
    ("lightning", "pytorch_lightning", "1.9.5", "pytorch_lightning/trainer/trainer.py", "Trainer"),
    ("accelerate", "accelerate", "1.15.0", "accelerate/accelerator.py", "Accelerator"),
    ("accelerate", "accelerate", "1.15.0", "accelerate/commands/config/config_args.py", "*"),
    ("titan", "torchtitan", "0.3.0", "torchtitan/config/configs.py", "*"),
    ("titan", "torchtitan", "0.3.0", "torchtitan/trainer.py", "Config"),
    ("titan", "torchtitan", "0.3.0", "torchtitan/components/validate.py", "*"),
    ("titan", "torchtitan", "0.3.0", "torchtitan/components/checkpointer/base.py", "Config"),
    ("titan", "torchtitan", "0.3.0", "torchtitan/components/checkpointer/dcp.py", "Config"),
    ("titan", "torchtitan", "0.2.0", "torchtitan/config/job_config.py", "*"),
]


def names_in(file: Path, wanted: str) -> set[str]:
    """Return fields and constructor parameters of a class, or of all classes of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.ClassDef) or wanted not in {"*", node.name}:
            continue
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found.add(each.target.id)
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                found |= {one.arg for one in (*each.args.args, *each.args.kwonlyargs)} - {"self"}
    return found


def main(folder: Path) -> None:
    """Write the names of every tool, and the versions they were read from."""
    tools: dict[str, dict[str, list[str]]] = {}
    for tool, package, version, file, wanted in SOURCES:
        entry = tools.setdefault(tool, {"versions": [], "names": []})
        told = f"{package} {version}"
        entry["versions"] += [] if told in entry["versions"] else [told]
        entry["names"] += names_in(folder / f"{package}-{version}" / file, wanted)
    for entry in tools.values():
        entry["names"] = sorted(set(entry["names"]))
    NAMES.write_text(json.dumps(tools, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
