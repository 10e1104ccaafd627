"""The files of examples/clusters: taken by the tools they are for, and what they have elasticflow do is taken by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import jsonschema
import pytest
import yaml

from elasticflow.cli.main import group
from elasticflow.clusters.kubernetes.render import render_kubernetes
from elasticflow.jobfile.load import require_job
from elasticflow.jobfile.tables.kubernetes import KubernetesTable
from elasticflow.launcher.machines.run_on_hosts import read_hosts
from tests.end_to_end.harness import ROOT, project_at
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

CLUSTERS = ROOT / "examples" / "clusters"
RECIPES = Path(__file__).parent / "recipes"


def test_every_file_is_in_the_readme() -> None:
    """With what was checked of it."""
    text = (CLUSTERS / "README.md").read_text("utf-8")
    names = {path.name for path in CLUSTERS.iterdir()} - {"README.md"}
    assert names == set(re.findall(r"\]\(([\w.]+)\)", text)) & names


def test_hosts_are_read() -> None:
    """As `run --hosts` reads them."""
    assert ["gpu1", "gpu2", "10.0.0.3"] == [host.name for host in read_hosts(CLUSTERS / "hosts.txt")]


def test_job_for_kubernetes_is_rendered() -> None:
    """What it extends goes along."""
    text = render_kubernetes(require_job(CLUSTERS / "kubernetes.job.toml", environment=None))
    (config, *_) = yaml.safe_load_all(text)
    assert {"examples_clusters_kubernetes.job.toml", "jobs_mnist.toml"} == set(config["data"])


def test_image_has_what_a_manifest_expects() -> None:
    """A base with a tag, files that are here, and the project where pods look for it."""
    lines = (CLUSTERS / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert {"FROM", "WORKDIR", "COPY", "RUN", "USER", "CMD"} == {step[0] for step in steps}
    assert ["1000"] == [step[1] for step in steps if step[0] == "USER"]  # a number, as runAsNonRoot needs
    assert all(":" in step[1] and not step[1].endswith(":latest") for step in steps if step[0] == "FROM")
    assert [KubernetesTable.model_fields["workdir"].default] == [s[1] for s in steps if s[0] == "WORKDIR"]
    copied = [word for step in steps if step[0] == "COPY" for word in step[1:-1]]
    assert copied[-1] == "."
    assert [] == [name for name in copied if not (ROOT / name).exists()]


def test_dockerfile_is_read_by_a_parser() -> None:
    """Of its own format."""
    parser = pytest.importorskip("dockerfile_parse")
    parsed = parser.DockerfileParser(path=str(CLUSTERS), env_replace=False)
    assert "python:3.12-slim-bookworm" == parsed.baseimage
    assert '["elasticflow", "doctor"]' == parsed.cmd


def schema_of(tool: str) -> dict[str, Any]:
    """Return a tool's schema, with the version that it is of."""
    loaded: dict[str, Any] = json.loads((RECIPES / f"{tool}.json").read_text("utf-8"))
    return loaded


def refusals(schema: dict[str, Any], value: object) -> list[str]:
    """Return what a schema says against a value."""
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


def test_skypilot_takes_its_file() -> None:
    """By the schema of the version named; a key that it does not have would be found."""
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text("utf-8"))
    schema = schema_of("skypilot")
    assert [] == refusals(schema["task"], task)
    assert [] == refusals(schema["resources"], task["resources"])
    assert refusals(schema["task"], {**task, "nodes": 4})
    assert refusals(
        schema["resources"], {**task["resources"], "job_recovery": {"recover_on_exit_codes": [1000]}}
    )


def test_dstack_takes_its_file() -> None:
    """By the schema of the version named; a key that it does not have would be found."""
    task = yaml.safe_load((CLUSTERS / "mnist.dstack.yml").read_text("utf-8"))
    schema = schema_of("dstack")["schema"]
    assert [] == refusals(schema, task)
    assert refusals(schema, {**task, "num_nodes": 4})
    assert refusals(schema, {**task, "retry": {"on_events": ["preemption"]}})


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("file", "variables", "run_id", "head"),
    [
        (
            "skypilot.yaml",
            {
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_TASK_ID": "sky-managed-2026-11-23-10-45-00-123456_mnist_1-0",
            },
            "sky-managed-2026-11-23-10-45-00-123456_mnist_1-0",
            "10.0.0.1:29400",
        ),
        (
            "mnist.dstack.yml",
            {
                "DSTACK_MASTER_NODE_IP": "10.0.0.1",
                "DSTACK_NODE_RANK": "1",
                "DSTACK_NODES_NUM": "2",
                "DSTACK_RUN_NAME": "mnist",
            },
            "mnist",
            "10.0.0.1:29400",
        ),
    ],
)
def test_command_of_a_recipe_is_one_that_we_take(
    tmp_path: Path, file: str, variables: Mapping[str, str], run_id: str, head: str
) -> None:
    """Run by bash with the variables that the tool sets, what it types is a command of ours, for a job that is right."""
    task = yaml.safe_load((CLUSTERS / file).read_text("utf-8"))
    script = task["run"] if "run" in task else task["commands"][-1]
    typed = type_in(tmp_path, script, {**variables, "SNAPSHOTS": "s3://BUCKET/mnist"})
    assert "run" == typed[0]
    command = group.get_command(click.Context(group), "run")
    assert command is not None
    given = command.make_context("run", typed[1:]).params
    assert (run_id, head, 1) == (given["run_id"], given["endpoint"], given["node_rank"])
    job = require_job(ROOT / given["job_file"], given["overrides"]).job
    assert job is not None
    assert (head, 2, "s3://BUCKET/mnist") == (job.nodes.endpoint, job.nodes.max, job.snapshots.uri)


def type_in(folder: Path, script: str, variables: Mapping[str, str]) -> list[str]:
    """Return the arguments that a script gives to elasticflow."""
    program = folder / ".venv" / "bin" / "elasticflow"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > typed\n')
    program.chmod(0o755)
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": f"{program.parent}:{os.environ['PATH']}", **variables},
        check=True,
        timeout=60,
    )
    return (folder / "typed").read_text().split("\0")[:-1]


@pytest.mark.campaign
def test_script_for_torchrun_trains_on_two_nodes(tmp_path: Path) -> None:
    """With nothing but torchrun; snapshots lie where both see them."""
    with project_at(tmp_path / "project") as project:
        shared = tmp_path / "shared"
        binary = tmp_path / "bin"
        binary.mkdir()
        (binary / "elasticflow").write_text(f'#!/bin/sh\nexec {sys.executable} -m elasticflow "$@"\n')
        (binary / "elasticflow").chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{binary}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "HEAD": "127.0.0.1",
            "PORT": str(free_port()),
            "NODES": "2",
            "RUN_ID": "site",
            "SNAPSHOTS": str(shared),
        }
        nodes = [
            subprocess.Popen(
                ["bash", str(CLUSTERS / "torchrun_only.sh"), "--nproc-per-node=1"],
                cwd=project.root,
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]
        try:
            assert [0, 0] == [node.wait(300) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert list(shared.glob("site/snapshots/*"))
