"""Rendered pods are taken by namespaces that enforce the restricted Pod Security profile.

The rules are those of https://kubernetes.io/docs/concepts/security/pod-security-standards/ as of Kubernetes 1.33, restricted
and baseline, for pods that run Linux.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from elasticflow.clusters.kubernetes.render import FORMS, Form
from elasticflow.errors import RenderError
from tests.clusters.kubernetes.test_render import CASES, objects, pod_templates, rendered

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"),
    "secret",
}


def violations(template: dict[str, Any]) -> set[str]:
    """Return the controls of the restricted profile, which has those of baseline, that a pod violates."""
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    violated = {
        "Host Namespaces": any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
        "Volume Types": any(set(volume) - {"name"} - VOLUMES for volume in spec.get("volumes", [])),
        # Some values are allowed; ours have none.
        "Sysctls, SELinux, AppArmor": {"sysctls", "seLinuxOptions", "appArmorProfile"} & set(pod),
    }
    kinds = ("initContainers", "containers", "ephemeralContainers")
    containers = [container for kind in kinds for container in spec.get(kind, [])]
    return {control for control, is_violated in violated.items() if is_violated}.union(
        *(container_violations(container, pod) for container in containers)
    )


def container_violations(container: dict[str, Any], pod: dict[str, Any]) -> set[str]:
    """Return the controls that a container violates; *pod*: the pod's own security context, which holds for it."""
    own = container.get("securityContext", {})
    context = {**pod, **own}
    capabilities = own.get("capabilities", {})
    violated = {
        "Privileged Containers": own.get("privileged"),
        "/proc Mount Type": own.get("procMount", "Default") != "Default",
        "SELinux, AppArmor": {"seLinuxOptions", "appArmorProfile"} & set(own),
        "Host Ports": any(port.get("hostPort") for port in container.get("ports", [])),
        "Privilege Escalation": own.get("allowPrivilegeEscalation") is not False,
        "Running as Non-root": context.get("runAsNonRoot") is not True,
        "Running as Non-root user": context.get("runAsUser") == 0,
        "Seccomp": context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"},
        "Capabilities": "ALL" not in capabilities.get("drop", [])
        or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
    }
    return {control for control, is_violated in violated.items() if is_violated}


@pytest.mark.parametrize(("job", "form"), CASES)
def test_pods_keep_to_the_restricted_profile(job: str, form: Form) -> None:
    """The training pods, and the pod of the store in which they meet."""
    templates = list(pod_templates(list(yaml.safe_load_all(rendered(job, form)))))
    assert {"small": 1, "full": 2}[job] == len(templates)
    assert [set()] * len(templates) == [violations(template) for template in templates]


@pytest.mark.parametrize(
    ("place", "key", "value", "control"),
    [
        ("spec", "hostNetwork", True, "Host Namespaces"),
        ("spec", "volumes", [{"name": "x", "hostPath": {"path": "/"}}], "Volume Types"),
        ("pod", "seccompProfile", {"type": "Unconfined"}, "Seccomp"),
        ("pod", "runAsNonRoot", None, "Running as Non-root"),
        ("pod", "runAsUser", 0, "Running as Non-root user"),
        ("container", "privileged", True, "Privileged Containers"),
        ("container", "procMount", "Unmasked", "/proc Mount Type"),
        ("container", "allowPrivilegeEscalation", None, "Privilege Escalation"),
        ("container", "capabilities", {"drop": ["NET_RAW"]}, "Capabilities"),
        ("container", "capabilities", {"drop": ["ALL"], "add": ["SYS_PTRACE"]}, "Capabilities"),
    ],
)
def test_rules_find_what_they_are_about(place: str, key: str, value: object, control: str) -> None:
    """A pod that is changed in one place violates one control."""
    (template,) = pod_templates(objects(rendered("small"))["Job"])
    template = copy.deepcopy(template)
    spec = template["spec"]
    at = {
        "spec": spec,
        "pod": spec["securityContext"],
        "container": spec["containers"][0]["securityContext"],
    }[place]
    at[key] = value
    assert {control} == violations(template)


def test_user_is_the_images_unless_it_is_set() -> None:
    """Volumes are the user's then; root is a choice."""
    contexts = [
        next(pod_templates(objects(rendered("small", None, *sets))["Job"]))["spec"]["securityContext"]
        for sets in ([], ["kubernetes.user=1234"], ["kubernetes.user=0"])
    ]
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    groups = {"runAsGroup": 1234, "fsGroup": 1234, "fsGroupChangePolicy": "OnRootMismatch"}
    assert [
        {"runAsNonRoot": True, **seccomp},
        {"runAsNonRoot": True, "runAsUser": 1234, **groups, **seccomp},
        {"runAsUser": 0, **seccomp},
    ] == contexts


def test_root_is_refused_by_the_profile() -> None:
    """It keeps what a container has by default, with which it writes to the folders of others."""
    (template,) = pod_templates(objects(rendered("small", None, "kubernetes.user=0"))["Job"])
    assert {"Running as Non-root", "Running as Non-root user", "Capabilities"} == violations(template)


def test_token_is_required_where_other_pods_may_join() -> None:
    """A Secret that was forgotten leaves no run open: its pods wait."""

    def token(*sets: str) -> list[Any]:
        (template,) = pod_templates(objects(rendered("small", None, *sets))["Job"])
        return [
            each["valueFrom"]["secretKeyRef"]
            for each in template["spec"]["containers"][0]["env"]
            if each["name"] == "ELASTICFLOW_TOKEN"
        ]

    assert [{"name": "small-token", "key": "token"}] == token()
    assert [{"name": "own", "key": "key"}] == token('kubernetes.secrets={ ELASTICFLOW_TOKEN = "own/key" }')
    assert [] == token("nodes.token_file=/secrets/token")
    assert [] == token("nodes.max=1")
    assert token() == token("nodes.max=1", "kubernetes.rendezvous_pod=true")
    assert token() == token("nodes.token_file=/secrets/token", "kubernetes.rendezvous_pod=true")


@pytest.mark.parametrize("form", FORMS)
def test_what_has_ended_is_deleted_after_a_while(form: Form) -> None:
    """The Job or the JobSet, but no Job inside it, which its JobSet would miss; a TrainJob cannot be."""
    set_ = "kubernetes.ttl_after_finished=1.5 h"
    if form == "trainjob":
        with pytest.raises(RenderError, match="deletes no TrainJob"):
            rendered("small", form, set_)
        return
    text = rendered("small", form, set_)
    document = objects(text)["Job" if form == "job" else "JobSet"]
    assert 5400 == document["spec"]["ttlSecondsAfterFinished"]
    assert 1 == text.count("ttlSecondsAfterFinished")
    assert "ttlSecondsAfterFinished" not in rendered("small", form)
