"""Lay out the pages of the website: `pages.py REPOSITORY DIRECTORY`.

Pages keep their places in the repository, so a link between two files is a link between two pages. The reference has no page in the
repository; its directives are written here, and mkdocstrings fills them from the docstrings. `llms.txt` lists the pages for readers that
are programs (llmstxt.org).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

LOOP = "elasticflow.runtime.loop"
# By heading, the objects and where they are defined.
REFERENCE: dict[str, dict[str, str]] = {
    "Own loops": {
        "elasticflow.join": f"{LOOP}.join.join",
        "elasticflow.Run": f"{LOOP}.run.Run",
        "elasticflow.Batch": f"{LOOP}.batch.Batch",
        "elasticflow.Gradients": f"{LOOP}.gradients.Gradients",
        "elasticflow.Sharding": "elasticflow.runtime.process.shard_layout.Sharding",
    },
    "Hooks": {"HookContext": f"{LOOP}.context.HookContext"},
    "Everywhere": {
        "elasticflow.StopTraining": "elasticflow.errors.StopTraining",
        "elasticflow.get_logger": "elasticflow.get_logger",
    },
    "Schedules": {"elasticflow.schedules": "elasticflow.schedules"},
    "Metrics": {"elasticflow.metrics": "elasticflow.metrics"},
    "Transformers": {"elasticflow.hugging_face": "elasticflow.hugging_face"},
    "LightningModules": {"elasticflow.lightning": "elasticflow.lightning"},
    "Sinks": {
        f"elasticflow.sinks.sink.{name}": f"elasticflow.sinks.sink.{name}"
        for name in ("Sink", "Point", "RunFacts", "SinkError")
    },
    "Values that hooks logged": {
        "elasticflow.protocol.points.read_points": "elasticflow.protocol.points.read_points"
    },
}
NOT_FOR_USERS = [
    "!^_",
    "!^end_if_forgotten$",
]  # the second is what `join` registers for the interpreter's end
# A file that a page links to goes along as it is; pages are found by their ending.
LINK = re.compile(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)")
ENTRY = re.compile(r"^- \[(?P<topic>[a-z0-9-]+)\]\((?P=topic)\.md\): (?P<about>.+)$", re.MULTILINE)
GUIDE = "elasticflow/guide"


def main(repository: Path, target: Path) -> None:
    """Write the project of the site generator into *target*, which must not exist."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    files = set(listed.stdout.split("\n")) - {""}
    docs = target / "docs"
    for name in _reached(repository, files):
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, path)
    (docs / "reference.md").write_text(_reference(), encoding="utf-8")
    topics = ENTRY.findall((repository / GUIDE / "README.md").read_text(encoding="utf-8"))
    (docs / "llms.txt").write_text(_llms(topics), encoding="utf-8")
    (target / "mkdocs.yml").write_text(json.dumps(_project(repository, topics), indent=2), encoding="utf-8")


def _reached(repository: Path, files: set[str]) -> set[str]:
    """Return README and all that it leads to, over pages."""
    reached: set[str] = set()
    left = ["README.md", "CHANGELOG.md"]
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        if not name.endswith(".md"):
            continue
        for link in LINK.findall((repository / name).read_text(encoding="utf-8")):
            path = (repository / name).parent.joinpath(link).resolve()
            if "://" not in link and path.is_relative_to(repository):
                left += (
                    [str(path.relative_to(repository))] if str(path.relative_to(repository)) in files else []
                )
    return reached


def _reference() -> str:
    lines = [
        "# Reference",
        "",
        "The names that your code may import. All others are private to the command.",
        "",
    ]
    for title, names in REFERENCE.items():
        lines += [f"## {title}", ""]
        for heading, path in names.items():
            lines += [
                f"::: {path}",
                "    options:",
                "      heading_level: 3",
                f"      heading: {heading}",
                f"      toc_label: {heading}",
                "",
            ]
    return "\n".join(lines)


def _llms(topics: list[tuple[str, str]]) -> str:
    lines = [
        "# elasticflow",
        "",
        "> A job file becomes a distributed PyTorch run that survives what happens to it.",
        "",
    ]
    lines += ["## Guide", "", *(f"- [{topic}]({GUIDE}/{topic}.md): {about}" for topic, about in topics)]
    return "\n".join(
        [*lines, "", "## Reference", "", "- [reference](reference.md): names that user code may import", ""]
    )


def _project(repository: Path, topics: list[tuple[str, str]]) -> dict[str, object]:
    options = {
        "docstring_style": "google",
        "show_source": False,
        "show_root_heading": True,
        "members_order": "source",
        "separate_signature": True,
        "merge_init_into_class": True,
        "filters": NOT_FOR_USERS,
        "line_length": 88,
    }
    return {
        "site_name": "elasticflow",
        "theme": {
            "name": "material",
            "features": ["navigation.instant", "search.suggest", "content.code.copy"],
        },
        "markdown_extensions": [
            "admonition",
            "attr_list",
            "tables",
            "toc",
            "pymdownx.superfences",
            "pymdownx.highlight",
        ],
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(repository)], "options": options}}}},
        ],
        "nav": [
            {"elasticflow": "README.md"},
            {"Guide": [{topic: f"{GUIDE}/{topic}.md"} for topic, _ in topics]},
            {"Reference": "reference.md"},
            {"Changes": "CHANGELOG.md"},
        ],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
