"""Manifests: the same text as before, valid by the published schemas, and refusals. Run as a program: makes the files again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from elasticflow.clusters.kubernetes.render import FORMS, Form, render_kubernetes
from elasticflow.errors import EXIT_CODES, INTERRUPTED, NOT_STARTED, JobRefusedError, RenderError
from elasticflow.jobfile.load import require_job

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
GOLDEN, SCHEMAS, JOBS = HERE / "golden", HERE / "schemas", HERE / "project" / "jobs"
CASES = [("small", form) for form in FORMS] + [("full", form) for form in FORMS]
VERSION = "1.33"  # of Kubernetes: the first in which all that is rendered is stable


def rendered(job: str, form: Form | None = None, *overrides: str, run_id: str | None = None) -> str:
    """Return the manifest of a job of the test's project."""
    loaded = require_job(JOBS / f"{job}.toml", overrides, environment=None)
    return render_kubernetes(loaded, overrides, form, run_id)


def objects(text: str) -> dict[str, Any]:
    """Return the objects of a manifest by their kinds; the last of each."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize(("job", "form"), CASES)
def test_manifest_is_as_it_was(job: str, form: Form) -> None:
    """Each change of the text is looked at: `python -m tests.clusters.kubernetes.test_render`."""
    assert (GOLDEN / f"{job}-{form}.yaml").read_text("utf-8") == rendered(job, form)


def test_manifest_names_the_whole_command() -> None:
    """Without what was set, the command may be refused, or makes another manifest."""
    first = rendered("small", "job", "train.epochs=3", 'kubernetes.image="other:2"').splitlines()[0]
    assert first.endswith("small.toml --set train.epochs=3 --set 'kubernetes.image=\"other:2\"'`.")


@pytest.mark.nightly
@pytest.mark.parametrize(("job", "form"), CASES)
def test_what_kubernetes_defines_is_valid_there(job: str, form: Form) -> None:
    """Every object, and every job inside another, by Kubernetes' own schema of the version named; unknown keys are errors."""
    import kubernetes_validate

    checked = 0
    for document in (*core_objects(rendered(job, form)),):
        kubernetes_validate.validate(document, VERSION, strict=True)
        checked += 1
    assert checked >= 2


def core_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that Kubernetes itself defines, those inside others as objects of their own."""
    for document in yaml.safe_load_all(text):
        inner = {"JobSet": ["spec"], "TrainingRuntime": ["spec", "template", "spec"], "TrainJob": None}
        path = inner.get(document["kind"], [])
        if path is None:
            continue
        if not path:
            yield document
            continue
        spec = document
        for key in path:
            spec = spec[key]
        for part in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **part["template"]}


@pytest.mark.parametrize(("job", "form"), [case for case in CASES if case[1] != "job"])
def test_what_jobset_and_trainer_define_is_valid_there(job: str, form: Form) -> None:
    """By the schemas of the versions named in the files, closed: unknown keys are errors."""
    kinds = []
    for document in yaml.safe_load_all(rendered(job, form)):
        path = SCHEMAS / f"{document['kind'].lower()}.json"
        if path.exists():
            published = json.loads(path.read_text())
            assert published["apiVersion"] == document["apiVersion"]
            jsonschema.Draft7Validator(published["schema"]).validate(document)
            kinds.append(document["kind"])
    assert {"jobset": ["JobSet"], "trainjob": ["TrainingRuntime", "TrainJob"]}[form] == kinds


def test_schemas_are_closed() -> None:
    """A misspelt key would be found."""
    published = json.loads((SCHEMAS / "jobset.json").read_text())
    document = objects(rendered("small", "jobset"))["JobSet"]
    document["spec"]["replicatedJob"] = []
    with pytest.raises(jsonschema.ValidationError, match="replicatedJob"):
        jsonschema.Draft7Validator(published["schema"]).validate(document)


@pytest.mark.usefixtures("real_processes")
def test_job_file_without_a_newline_at_its_end_is_rendered(tmp_path: Path) -> None:
    """In a process of its own, which ends; the file stands in the manifest line by line."""
    lines = [f"# {number}: what this job is about, and who is to be asked" for number in range(40)]
    text = "\n".join([*lines, (JOBS / "base.toml").read_text(), (JOBS / "small.toml").read_text()])
    text = text.replace('extends = "base.toml"\n', "").rstrip()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "job.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow", "submit", "kubernetes", "job.toml", "--print"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert text == objects(done.stdout)["ConfigMap"]["data"]["job.toml"]
    assert all(f"\n    {line}\n" in done.stdout for line in lines)


@pytest.mark.parametrize(("job", "form"), CASES)
def test_only_pods_of_the_run_may_connect_to_its_pods(job: str, form: Form) -> None:
    """The policy selects all pods of the manifest, and admits these; one without it is a choice."""
    text = rendered(job, form)
    policy = objects(text)["NetworkPolicy"]["spec"]
    selector = policy["podSelector"]["matchLabels"]
    assert ["Ingress"] == policy["policyTypes"]
    assert [{"from": [{"podSelector": {"matchLabels": selector}}]}] == policy["ingress"]
    labels = [each["metadata"]["labels"] for each in pod_templates(list(yaml.safe_load_all(text)))]
    assert labels
    assert all(selector.items() <= each.items() for each in labels)
    assert "NetworkPolicy" not in rendered(job, form, "kubernetes.network_policy=false")


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod template within a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for item in value.values():
            yield from pod_templates(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_templates(item)


def test_exit_codes_have_their_actions() -> None:
    """Only what is interrupted continues for ever, only what is refused ends at once; the rest is counted."""
    spec = objects(rendered("small"))["Job"]["spec"]
    rules = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert {75: "Ignore", 2: "FailJob", 3: "FailJob"} == rules
    assert set(rules) <= set(EXIT_CODES)
    assert (INTERRUPTED, NOT_STARTED) == (75, 2)
    conditions = [
        rule["onPodConditions"] for rule in spec["podFailurePolicy"]["rules"] if "onPodConditions" in rule
    ]
    assert [[{"type": "DisruptionTarget", "status": "True"}]] == conditions
    # A pod that was preempted is not asked for its exit code.
    assert "onPodConditions" in spec["podFailurePolicy"]["rules"][0]


def test_command_is_the_same_in_every_pod() -> None:
    """The case, flags and the run go along; what only the manifest is about stays out."""
    text = rendered("small", None, "train.epochs=3", "kubernetes.image=r/i:2", run_id="second")
    job = objects(text)["Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert ("small-second", "r/i:2") == (job["metadata"]["name"], container["image"])
    assert [
        *("elasticflow", "run", "jobs/small.toml", "--run-id", "second"),
        *("--join", "small-second-0.small-second:29400"),
        *("--set", "train.epochs=3", "--set", "nodes.endpoint=small-second-0.small-second:29400"),
        *("--node-rank", "$(JOB_COMPLETION_INDEX)"),
    ] == container["command"]


def test_runs_whose_ids_are_the_same_in_small_letters_have_objects_of_their_own() -> None:
    """The manifest of the second one would replace the first one's job file."""
    ids = ("trial", "Trial", "TRIAL", "a-b", "a.b", "a_b")
    names = [objects(rendered("small", run_id=each))["Job"]["metadata"]["name"] for each in ids]

    assert ["small-trial", "small-a-b"] == [names[0], names[3]]
    assert len(ids) == len(set(names))
    assert all(re.fullmatch("small-(trial|a-b)-[0-9a-f]{6}", names[number]) for number in (1, 2, 4, 5))


def test_store_of_the_jobs_own_is_where_the_pods_meet() -> None:
    """Any pod may lead then, and any pod's end is the run's."""
    text = rendered("small", None, "torchrun.rdzv_backend=etcd-v2", "nodes.endpoint=etcd.tools:2379")
    spec = objects(text)["Job"]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert "etcd.tools:2379" == command[command.index("--join") + 1]
    assert "--node-rank" not in command
    assert [{"succeededCount": 1}] == spec["successPolicy"]["rules"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "snapshots.uri=",
            "snapshots.uri: snapshots would be kept in the run folder, which goes with the pod",
        ),
        ("snapshots.uri=/elsewhere", "snapshots.uri: snapshots would be kept at /elsewhere"),
        ("snapshots.uri=/data/full", "snapshots.uri: snapshots would be kept at /data/full"),
        ("kubernetes.resources.gpu=0", 'nodes.nproc_per_node is "gpu", and kubernetes.resources.gpu gives'),
        ("nodes.nproc_per_node=9", "kubernetes.resources.gpu gives a pod 8, and nodes.nproc_per_node has 9"),
        (f"job.name={'n' * 60}", "and a name has at most 50 letters"),
    ],
)
def test_what_pods_cannot_run_is_refused(override: str, message: str) -> None:
    """With the key, and what to do."""
    with pytest.raises(RenderError) as raised:
        rendered("full", None, override)
    assert message in raised.value.message
    assert raised.value.remedy


def test_job_without_the_table_is_refused() -> None:
    """With the line that is missing."""
    with pytest.raises(RenderError, match=r"no \[kubernetes\]") as raised:
        rendered("base", None, "job.name=x", "dataset.samples=640")
    assert 'image = "registry/name:tag"' in str(raised.value.remedy)


def test_auto_counts_no_cores_of_a_whole_machine() -> None:
    """A pod has a part of them."""
    with pytest.raises(RenderError, match="a worker for each core of the machine"):
        rendered("small", None, "nodes.nproc_per_node=auto")


def test_file_outside_of_the_project_is_refused(tmp_path: Path) -> None:
    """The image has the project only."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    (tmp_path / "base.toml").write_text((JOBS / "base.toml").read_text())
    text = (JOBS / "small.toml").read_text().replace("base.toml", "../base.toml")
    (project / "small.toml").write_text(text)
    with pytest.raises(RenderError, match="is not in the project's folder"):
        render_kubernetes(require_job(project / "small.toml", environment=None))


@pytest.mark.parametrize("volume", ['shm = {path = "/x"}', 'mine = {path = "/dev/shm/"}'])
def test_volume_that_the_pods_have_already_is_refused(volume: str) -> None:
    """Kubernetes takes no two of a name, or of a path."""
    with pytest.raises(JobRefusedError, match="the pods have a volume"):
        rendered("small", "job", f"kubernetes.volumes={{{volume}}}")


if __name__ == "__main__":
    for name, kind in CASES:
        (GOLDEN / f"{name}-{kind}.yaml").write_text(rendered(name, kind), "utf-8")
