"""A site's own file, merged into the manifest; what fits nothing is refused with its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticflow import guide
from elasticflow.clusters.kubernetes.patch import patched
from elasticflow.clusters.yaml_text import Commented, yaml_documents
from elasticflow.errors import RenderError
from tests.clusters.kubernetes.test_pod_security import violations
from tests.clusters.kubernetes.test_render import VERSION, objects, pod_templates, rendered

MANIFEST: list[Any] = [
    Commented("first", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}}),
    {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b"}},
    {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": {
            "containers": [Commented("of it", {"name": "trainer", "args": ["x", "y"], "env": []})],
            "volumes": [{"name": "shm", "emptyDir": Commented("empty", {})}],
        },
    },
]


def merged(tmp_path: Path, text: str) -> tuple[str, list[Any]]:
    """Return the manifest with a patch, as text and as values."""
    path = tmp_path / "site.yaml"
    path.write_text(text)
    found = yaml_documents(*patched(MANIFEST, path))
    return found, list(yaml.safe_load_all(found))


def test_fields_are_merged_as_kubernetes_does(tmp_path: Path) -> None:
    """Mappings and lists with names key by key, other lists as a whole; null takes away; comments stay."""
    text, (service, other, job) = merged(
        tmp_path,
        """
kind: Job
spec:
  affinity: {nodeAffinity: {}}
  containers:
  - name: sidecar
    image: "r/s:1"
  - name: trainer
    args: [z]
    imagePullPolicy: Always
    env: [{name: A, value: "1"}]
  volumes:
  - name: shm
    emptyDir: {medium: Memory}
---
kind: Service
metadata: {name: b, labels: {x: "yes"}}
---
apiVersion: batch/v1
kind: Job
spec:
  affinity:
""",
    )
    assert MANIFEST[0].value == service
    assert {**MANIFEST[1], "metadata": {"name": "b", "labels": {"x": "yes"}}} == other
    trainer = {"name": "trainer", "args": ["z"], "imagePullPolicy": "Always"}
    assert {
        "containers": [
            {**trainer, "env": [{"name": "A", "value": "1"}]},
            {"name": "sidecar", "image": "r/s:1"},
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    } == job["spec"]
    assert all(f"# {comment}\n" in text for comment in ("first", "of it", "empty"))
    assert MANIFEST[2]["spec"]["volumes"] == [{"name": "shm", "emptyDir": Commented("empty", {})}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# x\n\nkind: Jobs\n", "site.yaml:3: the manifest has no Jobs"),
        ("kind: Job\nmetadata: {name: c}\n", "site.yaml:1: the manifest has no Job c"),
        ("kind: Job\napiVersion: batch/v2\n", "site.yaml:1: the manifest has no batch/v2 Job"),
        ("kind: Job\n---\nkind: Service\n", "site.yaml:3: the manifest has 2 Service"),
        ("spec: {}\n", "has no object without a kind"),
        ("- a\n", "this is no object of Kubernetes"),
        ("kind: Job\nspec: &a {b: *a}\n", "site.yaml:1: a value holds itself"),
        (f"kind: Job\nspec: {'[' * 600}\n", "site.yaml cannot be read"),
        ("kind: Job\nspec: [a]\n", "spec: the manifest has a mapping there"),
        ("kind: Job\nspec: {containers: x}\n", "spec.containers: the manifest has a list there"),
        ("kind: Job\nmetadata: {name: a}\nspec: {volumes: [{emptyDir: {}}]}\n", "spec.volumes.0: an item without name"),
        ("kind: Job\nspec: {a: {b: null}}\n", "spec.a.b: the manifest has no such key to take away"),
        ("kind: Job\nspec: {$patch: replace}\n", "spec.$patch: directives of patches are not known"),
        ("kind: Job\nspec: {mode: 0644}\n", "spec.mode: 644 is 420 to some readers"),
        ("kind: Job\nspec: {mode: yes}\n", "spec.mode: yes is True to some readers"),
        ("kind: Job\nspec: {at: 2026-01-01}\n", "spec.at: 2026-01-01 is 2026-01-01 to some"),
        ("kind: Job\nspec: {on: 1}\n", "spec: {'on': 1} is {True: 1} to some readers"),
        ("kind: Job\nspec: {1: 1}\n", "spec.1: a key is a text"),
        ("kind: Job\nkind: Job\n", "cannot be read"),
        ("kind: [\n", "cannot be read"),
        ("# nothing\n", "is empty"),
        ("kind: Job\n---\n", "site.yaml:3: this is no object of Kubernetes"),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the file's line, the key, and what to do."""
    with pytest.raises(RenderError) as raised:
        merged(tmp_path, text)
    assert message in raised.value.message
    assert raised.value.remedy


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(RenderError, match=r"gone\.yaml cannot be read"):
        patched(MANIFEST, tmp_path / "gone.yaml")


def test_job_names_its_patch(tmp_path: Path) -> None:
    """The pods' command has no word of it, and a manifest without one is the same."""
    path = tmp_path / "site.yaml"
    path.write_text(
        "kind: Job\nspec: {template: {spec: {containers: [{name: trainer, imagePullPolicy: Always}]}}}\n"
    )
    text = rendered("small", None, f"kubernetes.patch={path}")
    plain = objects(rendered("small"))
    (container,) = objects(text)["Job"]["spec"]["template"]["spec"]["containers"]
    assert "Always" == container.pop("imagePullPolicy")
    assert plain["Job"]["spec"]["template"]["spec"]["containers"] == [container]
    assert plain["Service"] == objects(text)["Service"]


def recipes() -> list[str]:
    """Return the patches that the guide shows."""
    page = Path(guide.__file__).with_name("kubernetes.md").read_text()
    section = page.partition("## A site's own fields")[2].partition("\n## ")[0]
    return re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)


def test_guide_shows_each_need() -> None:
    """One patch for each."""
    shown = "\n".join(recipes())
    for key in (
        "podAffinity",
        "topologySpreadConstraints",
        "imagePullPolicy",
        "initContainers",
        "restartPolicy: Always",
        "ingress",
    ):
        assert f"{key}" in shown


VOLUME = 'kubernetes.volumes={ data = { path = "/data" } }'


def of_recipe(folder: Path, recipe: str) -> str:
    """Return the manifest with the patch *recipe*, and a volume."""
    path = folder / "site.yaml"
    path.write_text(recipe)
    return rendered("small", None, f"kubernetes.patch={path}", VOLUME)


@pytest.mark.parametrize("recipe", recipes())
def test_patch_of_the_guide_is_merged(tmp_path: Path, recipe: str) -> None:
    """All of the patch is there, and the pods keep to the restricted profile."""
    patch = yaml.safe_load(recipe)
    whole = objects(of_recipe(tmp_path, recipe))
    assert contains(whole[patch["kind"]], patch)
    assert not contains(objects(rendered("small", None, VOLUME))[patch["kind"]], patch)
    (template,) = pod_templates(whole["Job"])
    assert set() == violations(template)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", recipes())
def test_patch_of_the_guide_is_valid(tmp_path: Path, recipe: str) -> None:
    """By the schema of Kubernetes, which has no unknown key."""
    import kubernetes_validate

    for document in yaml.safe_load_all(of_recipe(tmp_path, recipe)):
        kubernetes_validate.validate(document, VERSION, strict=True)
    wrong = yaml.safe_load(recipe.replace("spec:", "specs:", 1))
    kind = objects(rendered("small", None, VOLUME))[wrong["kind"]]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong | {"apiVersion": kind["apiVersion"]}, VERSION, strict=True)


def contains(whole: Any, part: Any) -> bool:
    """Return whether *part* stands in *whole*: each key of a mapping, each item of a list."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and contains(whole[key], value) for key, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(contains(item, each) for item in whole) for each in part)
    return bool(whole == part)
