"""The folder that is made on a machine with a GPU: steps that fail or hang, the table, the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import measure, packages
from tests.gpu.measure import Results, Step, StepRunner
from tests.measured.benchmarks.recovery_figures import Try

ROOT = Path(__file__).resolve().parents[2]


def test_table_says_what_passed_where_and_how_fast() -> None:
    """It is bound to a commit; what failed and what is too slow stands out."""
    results = Results({"commit": "abc", "GPU": "1 x H200"})
    results.outcomes = {"tests/a.py::test_one": "passed", "tests/a.py::test_two": "failed"}
    results.told = {"test_one": {"idle_share": "0.250"}}
    results.digests = {"test_one0/runs/small/killed": "a1b2"}
    results.steps = [Step("a", "python -m pytest tests/a.py", "1", 61.2)]
    results.tries = {"gpu": [Try(0.7), Try(0.9), Try(0.8)]}
    text = results.table()
    assert "commit: abc, GPU: 1 x H200." in text
    assert "1 of 2 tests passed." in text
    assert "| tests/a.py::test_two | failed |" in text
    assert "| `python -m pytest tests/a.py` | 1 | 61 |" in text
    assert "| test_one0/runs/small/killed | a1b2 |" in text
    assert "| test_one | idle_share: 0.250 |" in text
    assert "- BROKEN: gpu: 0.80 s, at most 0.5 s" in text
    assert not results.is_good()


def test_report_of_pytest_has_what_tests_recorded(tmp_path: Path) -> None:
    """A test that recorded nothing is left out."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_one"><properties><property name="tier" value="gpu"/>'
        '<property name="idle_share" value="0.250"/></properties></testcase><testcase name="test_two"/></testsuite></testsuites>'
    )
    assert measure.recorded(report) == {"test_one": {"idle_share": "0.250"}}


@pytest.mark.usefixtures("real_processes")
def test_step_that_hangs_or_cannot_start_leaves_its_log_and_the_rest(tmp_path: Path) -> None:
    """It is interrupted at its limit; once the time for all is over, the others are left out by name."""
    runner = StepRunner(tmp_path, Results({}), 3600)
    said = runner.run("hangs", [sys.executable, "-uc", "print('begun'); import time; time.sleep(600)"], 3)
    runner.run("missing", [str(tmp_path / "missing")], 3)
    assert runner.run("goes", [sys.executable, "-c", "print('gone')"], 60) == "gone\n"
    StepRunner(tmp_path, runner.results, -1).run("late", [sys.executable, "-c", ""], 60)
    assert said.startswith("begun\n")
    hung, missing, went, late = runner.results.steps
    assert hung.ended == "interrupted after 3 s"
    assert "No such file" in missing.ended
    assert went.ended == "0"
    assert late.ended == "left out: no time was left"


@pytest.mark.nightly
def test_tests_for_a_gpu_are_collected_with_no_package_but_the_listed_ones() -> None:
    """On a bare machine `run.sh` installs these, and each of its files must bring tests."""
    program = _COLLECTS.format(
        requirements=packages.requirements(), command=measure.pytest_command(list(measure.TESTS))[3:]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in measure.TESTS:
        assert f"{file}::" in done.stdout


# Modules of packages that do not follow from the requirements cannot be imported.
_COLLECTS = """
import importlib.abc, os, sys
from importlib import metadata
from importlib.machinery import PathFinder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

allowed, waiting = set(), [Requirement(text) for text in {requirements!r}]
while waiting:
    needed = waiting.pop()
    name = canonicalize_name(needed.name)
    if name in allowed or (needed.marker is not None and not needed.marker.evaluate({{"extra": ""}})):
        continue
    allowed.add(name)
    try:
        waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        pass
modules = {{
    module
    for module, names in metadata.packages_distributions().items()
    if module not in sys.stdlib_module_names and not allowed & set(map(canonicalize_name, names))
}} - {{"elasticflow", "tests", "examples"}}

class Listed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in modules:
            return PathFinder.find_spec(name, path, target)

for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
    del sys.modules[name]
sys.meta_path[sys.meta_path.index(PathFinder)] = Listed()
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
import pytest
sys.exit(pytest.main([*{command!r}, "--collect-only", "-qq", "-p", "pytest_timeout"]))
"""
