"""What a launch is made from besides its job: which files take part, and what differences between launches weigh."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.launch_folder import made_in
from elasticflow.compiler.provenance.drift import compare_made, lines_of
from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.compiler.provenance.origins import (
    Made,
    Origins,
    SourceFile,
    made_from,
    origins_now,
    own_sources,
)
from elasticflow.errors import LaunchFolderError
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from pathlib import Path

_MACHINE = {"cpu": "one", "gpus": [], "cores": 2, "kernel": "6.1", "libc": "glibc 2.36"}


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_imports_are_followed_through_the_jobs_own_code(tmp_path: Path) -> None:
    """Packages above, relative imports, imports in functions; not what nobody imports, nor what is installed."""
    _write(
        tmp_path,
        {
            "job.toml": "",
            "pieces.py": "import torch\nfrom lab import layers\ndef digits():\n    import lab.data.reader as r\n",
            "lab/__init__.py": "",
            "lab/layers.py": "from . import tools\nfrom .tools import missing\n",
            "lab/tools.py": "",
            "lab/data/__init__.py": "from ..deep import *\n",
            "lab/deep.py": "import pieces\n",
            "lab/data/reader.py": "def broken(:\n",
            "lab/unused.py": "",
            "scores.py": "",
        },
    )
    job = make_job(evaluation__entry="pieces:digits", evaluation__metrics={"a": "scores:a"})
    found = own_sources(job, tmp_path, ["job.toml"])

    assert [
        *("job.toml", "lab/__init__.py", "lab/data/__init__.py", "lab/data/reader.py"),
        *("lab/deep.py", "lab/layers.py", "lab/tools.py", "pieces.py", "scores.py"),
    ] == list(found)
    assert ("dataset", "evaluation", "model") == found["lab/tools.py"].roles
    assert (("evaluation",), ("job file",)) == (found["scores.py"].roles, found["job.toml"].roles)


def test_an_editable_package_in_the_project_is_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python finds it by a folder on its path; not what an environment in the project has on that path."""
    _write(
        tmp_path,
        {
            "src/pieces.py": "from lab import layers\nimport settled, loose",
            "src/lab/__init__.py": "",
            "src/lab/layers.py": "",
            "env/lib/settled.py": "",
            "env/lib/site-packages/loose.py": "",
        },
    )
    for folder in ("src", "env/lib", "env/lib/site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    found = own_sources(make_job(), tmp_path, [])
    assert ["src/lab/__init__.py", "src/lab/layers.py", "src/pieces.py"] == list(found)


def _made(*, exact: bool = False, cores_count: bool = False, **changes: Any) -> Made:
    threads = {} if cores_count else {"train__threads": 1}
    job = make_job(train__consistency="exact" if exact else "batch", **threads)
    sources = {"pieces.py": SourceFile("a", ("model",)), "scores.py": SourceFile("a", ("evaluation",))}
    versions = {"torch": "2.13.0", "python": "3.11.1", "albumentations": "1"}
    base = Origins(sources, {"commit": "c" * 40}, versions, _MACHINE, "id")
    return Made(job, replace(base, **changes))


@pytest.mark.parametrize(
    ("change", "key", "batch", "exact"),
    [
        (
            {"sources": {"pieces.py": SourceFile("b", ("model",))}},
            "sources.pieces.py",
            "harmless",
            "trajectory",
        ),
        (
            {"sources": {"scores.py": SourceFile("b", ("evaluation",))}},
            "sources.scores.py",
            "harmless",
            "harmless",
        ),
        ({"versions": {"torch": "2.13.1"}}, "versions.torch", "harmless", "trajectory"),
        ({"versions": {"albumentations": "2"}}, "versions.albumentations", "harmless", "trajectory"),
        ({"versions": {"python": "3.12.1"}}, "versions.python", "harmless", "harmless"),
        ({"machine": {"cpu": "another"}}, "machine.cpu", "harmless", "trajectory"),
        ({"machine": {"gpus": ["H100"]}}, "machine.gpus", "harmless", "trajectory"),
        ({"machine": {"cores": 8}}, "machine.cores", "harmless", "harmless"),
        ({"machine": {"kernel": "7"}}, "machine.kernel", "harmless", "harmless"),
        ({"git": {"commit": "d" * 40}}, "git.commit", "harmless", "harmless"),
    ],
)
def test_one_difference(change: dict[str, Any], key: str, batch: str, exact: str) -> None:
    """In batch mode nothing but the job stands in the way; in exact mode whatever bits depend on does."""
    for is_exact, weight in ((False, batch), (True, exact)):
        old = _made(exact=is_exact)
        name, values = next(iter(change.items()))
        merged: dict[str, Any] = {name: {**getattr(old.origins, name), **values}}
        (found,) = compare_made(old, _made(exact=is_exact, **merged))
        assert (key, weight) == (found.key, found.weight)
        assert found.reason


def test_cores_are_threads_where_nobody_sets_them() -> None:
    """Without train.threads a worker takes its share of the node's cores, and so do the bits."""
    old = _made(exact=True, cores_count=True)
    (found,) = compare_made(old, _made(exact=True, cores_count=True, machine={**_MACHINE, "cores": 8}))
    assert ("machine.cores", "trajectory") == (found.key, found.weight)


def test_what_an_older_launch_did_not_record_is_no_difference(tmp_path: Path) -> None:
    """A job.json without origins is compared by its job alone."""
    before = made_from({"job": job_to_json(make_job())})
    assert [] == compare_made(before, Made(make_job(), origins_now(make_job(), tmp_path, [], "id")))


def test_record_and_back(tmp_path: Path) -> None:
    """What job.json holds says the same when it is read, with what the workers found beside it."""
    made = _made(exact=True)
    record = {"job": job_to_json(made.job), **made.origins.to_json()}
    _write(tmp_path, {"job.json": json.dumps(record)})
    assert made == made_in(tmp_path)

    _write(
        tmp_path, {"environment.json": json.dumps({"files": {"late.py": "e"}, "versions": {"scipy": "1"}})}
    )
    found = made_in(tmp_path).origins
    assert (SourceFile("e", ("imported",)), "1") == (found.sources["late.py"], found.versions["scipy"])


@pytest.mark.parametrize("text", [None, "[]", "{", "{}", '{"job": 1}'])
def test_no_record(tmp_path: Path, text: str | None) -> None:
    """A folder without a job.json that can be read is refused by its name."""
    if text is not None:
        _write(tmp_path, {"job.json": text})
    with pytest.raises(LaunchFolderError, match=r"job\.json"):
        made_in(tmp_path)


def test_table_is_grouped_by_weight() -> None:
    """The weightiest group first, values beside each other, what is not there a dash."""
    old, new = make_job(), make_job(job__seed=7, nodes__max=2, optimizer__args={"momentum": 0.9})
    lines = list(lines_of(compare_made(_made()._replace(job=old), _made()._replace(job=new))))
    assert [
        "  would corrupt the run",
        "    job.seed                 0 -> 7    the order of samples is another: some would be repeated, some left out",
        "  changes the trajectory",
        "    optimizer.args.lr        0.1 -> -  the rest of the run is trained in another way; what the optimizer has learned stays",
        "    optimizer.args.momentum  - -> 0.9  the rest of the run is trained in another way; what the optimizer has learned stays",
        "  harmless",
        "    nodes.max                1 -> 2    the global batch is the same at every world size",
    ] == lines
