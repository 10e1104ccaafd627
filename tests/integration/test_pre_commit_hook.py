"""The hooks as other repositories use them: installed by pre-commit, then run without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
JOB = """\
[job]
name = "{name}"

[model]
entry = "{package}.net:Net"
loss = "torch.nn.functional:cross_entropy"

[optimizer]
entry = "torch.optim:AdamW"

[dataset]
entry = "{package}.net:digits"
global_batch_size = 64

[train]
epochs = 5
"""
NET = "def digits():\n    return []\n\n\nclass Net(object):\n    pass\n"
# Whoever asks a proxy meets a closed door.
NOWHERE = dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
)


@dataclass(frozen=True)
class Hook:
    """pre-commit with the hook installed, in a home of its own."""

    repository: Path
    home: Path
    seconds: float

    def environment(self) -> Path:
        """Return the folder of packages that pre-commit has made for the hook."""
        [packages] = self.home.glob("repo*/py_env-*/lib/python*/site-packages")
        return packages

    def run(self, folder: Path, *arguments: str, offline: bool = True) -> tuple[int, str]:
        """Run pre-commit in a folder; return exit code and output."""
        environment = os.environ | {"PRE_COMMIT_HOME": str(self.home), "PRE_COMMIT_COLOR": "never"}
        environment.pop("PIP_NO_COMPILE", None)  # .ci/run has it: the hook's size is that which users get
        command = [sys.executable, "-m", "pre_commit", *arguments]
        if offline:
            command = [*_cut_off(), *command]
            environment |= NOWHERE
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
        )  # fmt: skip
        return done.returncode, done.stdout


def _cut_off() -> list[str]:
    """Return what begins a command that shall see no network; nothing where that is not permitted."""
    words = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None:
        return []
    is_permitted = subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
    return words if is_permitted else []


def git(folder: Path, *arguments: str) -> str:
    """Run git and return what it prints."""
    known = ["-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "safe.directory=*"]
    done = subprocess.run(
        ["git", *known, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def make_project(folder: Path, hook: Path) -> Path:
    """Make a repository that uses the hook."""
    (folder / "shop").mkdir(parents=True)
    (folder / "shop" / "net.py").write_text(NET)
    (folder / "pyproject.toml").touch()
    repos = [
        {"repo": str(hook), "rev": git(hook, "rev-parse", "HEAD"), "hooks": [{"id": "elasticflow-validate"}]}
    ]
    (folder / ".pre-commit-config.yaml").write_text(json.dumps({"repos": repos}))
    git(folder, "init", "--quiet")
    return folder


def write(project: Path, names: Iterable[str], package: str = "shop") -> None:
    """Write good job files, and have git know them."""
    for number, name in enumerate(names):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(JOB.format(name=f"job{number}", package=package))
    git(project, "add", ".")


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Hook:
    """Install the hook from a clone of this repository's last commit."""
    folder = tmp_path_factory.mktemp("hook")
    git(folder, "clone", "--quiet", str(ROOT), "elasticflow")
    project = make_project(folder / "project", folder / "elasticflow")
    began = time.monotonic()
    code, text = Hook(folder / "elasticflow", folder / "home", 0).run(project, "install-hooks", offline=False)
    assert code == 0, text
    return Hook(folder / "elasticflow", folder / "home", time.monotonic() - began)


@pytest.fixture
def project(hook: Hook, tmp_path: Path) -> Path:
    """Return a new repository that uses the hook."""
    return make_project(tmp_path / "project", hook.repository)


def test_environment_is_light_and_has_the_schema(hook: Hook, capsys: pytest.CaptureFixture[str]) -> None:
    """No torch, nothing of an extra, and the package's own data; its size and time are printed."""
    packages = hook.environment()
    names = {path.name.partition("-")[0].lower() for path in packages.glob("*.dist-info")}
    mebibytes = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 2**20
    with capsys.disabled():
        print(
            f"\nhook environment: {len(names)} packages, {mebibytes:.0f} MiB, installed in {hook.seconds:.0f} s"
        )
    assert {"elasticflow", "pydantic", "tomli", "click"} <= names
    assert names.isdisjoint({"torch", "numpy", "safetensors", "s3fs"})
    assert mebibytes < 80
    program = packages.parents[2] / "bin" / "elasticflow"
    done = subprocess.run(
        [program, "guide", "--schema", "job"], capture_output=True, text=True, timeout=60, check=True
    )
    assert (hook.repository / "elasticflow" / "jobfile" / "tables" / "job.schema.json").read_text(
        "utf-8"
    ) == done.stdout


def test_many_files_in_any_folder_are_checked_without_a_network(hook: Hook, project: Path) -> None:
    """200 files, which pre-commit shares out to several processes; other TOML files are left alone."""
    places = ("jobs/a{}.toml", "jobs/vision/small/b{}.toml", "services/text/jobs/c{}.toml", "d{}.job.toml")
    write(project, [place.format(number) for place in places for number in range(50)])
    (project / "notes.toml").write_text("neither = 'a job'\n")
    git(project, "add", ".")
    code, text = hook.run(project, "run", "--all-files", "--verbose")
    assert code == 0, text
    assert sum(map(int, re.findall(r"^(\d+) files? checked", text, re.MULTILINE))) == 200
    # From a subfolder it is the same.
    assert hook.run(project / "jobs" / "vision", "run", "--all-files")[0] == 0


def test_a_bad_file_fails_with_its_place(hook: Hook, project: Path) -> None:
    """Exit code 1, file, line and column, and what to do."""
    write(project, ["jobs/good.toml", "jobs/deep/bad.toml"])
    bad = project / "jobs" / "deep" / "bad.toml"
    bad.write_text(bad.read_text().replace("epochs", "epoch"))
    git(project, "add", ".")
    for folder in (project, project / "shop"):
        code, text = hook.run(folder, "run")
        assert code == 1
        assert "jobs/deep/bad.toml:16:1" in text
        assert 'did you mean "epochs"?' in text


def test_a_project_inside_the_repository_is_its_own(hook: Hook, project: Path) -> None:
    """Entry points are found from the nearest pyproject.toml, and a wrong one is refused there."""
    inner = project / "services" / "vision"
    (inner / "eyes").mkdir(parents=True)
    (inner / "eyes" / "net.py").write_text(NET)
    (inner / "pyproject.toml").touch()
    write(project, ["services/vision/jobs/good.toml"], "eyes")
    assert hook.run(project, "run")[0] == 0
    path = inner / "jobs" / "good.toml"
    path.write_text(path.read_text().replace("net:Net", "net:Nett"))
    git(project, "add", ".")
    code, text = hook.run(project, "run")
    assert code == 1
    assert 'did you mean "Net"?' in text


def test_bases_pass_though_they_are_no_whole_jobs(hook: Hook, project: Path) -> None:
    """A base is told by its name; what it holds is checked all the same."""
    whole = JOB.format(name="small", package="shop")
    base, own = whole[: whole.index("[train]")], whole[whole.index("[train]") :]
    (project / "jobs").mkdir()
    for name, text in {
        "base.toml": base,
        "_long.toml": own,
        "small.toml": 'extends = ["base.toml", "_long.toml"]\n',
    }.items():
        (project / "jobs" / name).write_text(text)
    git(project, "add", ".")
    code, text = hook.run(project, "run", "--verbose")
    assert (code, "3 files checked: no problems" in text) == (0, True), text
    (project / "jobs" / "_long.toml").write_text("[train]\nepochs = 0\n")
    git(project, "add", ".")
    code, text = hook.run(project, "run")
    assert code == 1
    assert "jobs/_long.toml:2:10" in text


def test_training_scripts_are_linted(hook: Hook, project: Path) -> None:
    """By `elasticflow-lint`, from the same environment: warnings fail unless its arguments are taken away."""
    config = project / ".pre-commit-config.yaml"
    repos = json.loads(config.read_text())["repos"]
    repos[0]["hooks"] = [{"id": "elasticflow-lint"}]
    config.write_text(json.dumps({"repos": repos}))
    (project / "train.py").write_text(
        "import torch\nfor epoch in range(9):\n    torch.save(model.state_dict(), 'last.pt')\n"
    )
    git(project, "add", ".")
    code, text = hook.run(project, "run", "--all-files")
    assert code == 1, text
    assert "train.py:3:5" in text
    repos[0]["hooks"][0]["args"] = []
    config.write_text(json.dumps({"repos": repos}))
    git(project, "add", ".")
    assert hook.run(project, "run", "--all-files")[0] == 0
