"""Pods without a cluster: what a manifest says, as processes in namespaces of their own; needs root, iproute2 and util-linux.

Each pod has a network with an address of its own, a host name, the names of the others in /etc/hosts as the cluster's DNS
would have them, a process tree in which its command is the first process, /dev/shm, and a copy of the image's folder into
which the ConfigMap's files are mounted. What is not here: images, schedulers, limits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from elasticflow.run_folder import RunFolder
from tests.end_to_end.harness import ROOT, Running
from tests.hosts import ip

if TYPE_CHECKING:
    from pathlib import Path

# In the pod: its host name, its own names of hosts, its memory for /dev/shm, its volume in /var/lib, its files.
_BEGIN = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size=512m tmpfs /dev/shm
mkdir -p "$3/volume" && mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/elasticflow
mount --bind "$3/volume" /var/lib/elasticflow
mount --bind "$3" "$4"
cd "$4"
shift 4
exec "$@"
"""


@dataclass
class Pod:
    """One pod: a container that has been started.

    Attributes:
        running: Its command; the run's folder is the one in the pod.
        init: Its first process, as this machine sees it.
        network: Its network namespace, whose name its files have, too.
    """

    name: str
    running: Running
    init: psutil.Process
    network: str

    def signal(self, number: int) -> None:
        """Send a signal to the container's first process, as the kubelet does."""
        os.kill(self.init.pid, number)

    def exit_code(self) -> int:
        """Return the container's exit code, once it has ended by itself."""
        return self.running.end()

    def kill(self) -> None:
        """Take the pod away without a word, as a machine that fails does; all its processes are gone."""
        self.signal(signal.SIGKILL)
        self.running.end()


@dataclass
class Cluster:
    """Hosts for pods, on one network.

    Attributes:
        root: Folder for all files.
        image: What is at the container's working folder before anything is mounted.
        manifest: Objects by their kinds.
        secrets: Values by the names of Secrets and keys.
    """

    root: Path
    image: Path
    manifest: dict[str, Any]
    secrets: dict[tuple[str, str], str] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _made: int = 0

    @classmethod
    def of(cls, root: Path, image: Path, text: str) -> Cluster:
        """Return the cluster that runs the manifest *text*."""
        return cls(root, image, {each["kind"]: each for each in yaml.safe_load_all(text)})

    @property
    def _switch(self) -> str:
        return f"efpods{os.getpid()}"

    def make(self) -> None:
        """Make the network that the pods are on."""
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")

    def remove(self) -> None:
        """End all pods, and remove what was made."""
        for pod in self.pods:
            if pod.init.is_running():
                pod.init.kill()
            pod.running.process.wait()
        for name in [f"{self._switch}-{number}" for number in range(self._made)] + [self._switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def template(self) -> dict[str, Any]:
        """Return the pod template."""
        template: dict[str, Any] = self.manifest["Job"]["spec"]["template"]
        return template

    def pod(self, index: int) -> Pod:
        """Start the pod with *index*: with another address and other files than one before it with that index."""
        spec = self.template()["spec"]
        host = f"{self.manifest['Job']['metadata']['name']}-{index}"
        return self._run(spec, host, f"{host}.{spec['subdomain']}", index)

    def rendezvous(self, before: Pod | None = None) -> Pod:
        """Start the pod of the store, by the name of its Service; or its container again: same address, same volume."""
        name = self.manifest["Deployment"]["metadata"]["name"]
        spec = self.manifest["Deployment"]["spec"]["template"]["spec"]
        if before is not None:
            return self._start_container(spec, name, 0, before.network)
        return self._run(spec, name, name, 0)

    def _run(self, spec: dict[str, Any], host: str, name: str, index: int) -> Pod:
        network, address = self._network()
        # Written in place: pods have the same files mounted.
        self._names[name] = address
        files = self.root / network
        shutil.copytree(self.image, files)
        self._mount_job(spec, files)
        (self.root / f"hosts-{network}").touch()
        return self._start_container(spec, host, index, network)

    def _start_container(self, spec: dict[str, Any], host: str, index: int, network: str) -> Pod:
        files, hosts = self.root / network, self.root / f"hosts-{network}"
        running = self._start(spec["containers"][0], index, (network, host, str(hosts), str(files)), files)
        self._tell_names()
        (init,) = running.wait_for("the pod's first process", lambda: _first_process(running.process.pid))
        pod = Pod(host, running, init, network)
        self.pods.append(pod)
        return pod

    def _network(self) -> tuple[str, str]:
        """Make a network namespace on the switch; return its name and its address."""
        number = self._made
        self._made += 1
        address, network = f"10.78.{number // 250}.{number % 250 + 1}", f"{self._switch}-{number}"
        link = ["-n", self._switch, "link"]
        ip("netns", "add", network)
        ip(*link, "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", network)
        ip(*link, "set", f"p{number}", "master", "br0", "up")
        ip("-n", network, "addr", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", network, "link", "set", device, "up")
        return network, address

    def _mount_job(self, spec: dict[str, Any], files: Path) -> None:
        """Put the ConfigMap's files where they are mounted."""
        (container,) = spec["containers"]
        maps = {v["name"]: v["configMap"]["name"] for v in spec.get("volumes", ()) if "configMap" in v}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in maps:
                assert maps[mount["name"]] == self.manifest["ConfigMap"]["metadata"]["name"]
                within = os.path.relpath(mount["mountPath"], container["workingDir"])
                path = files / within
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.manifest["ConfigMap"]["data"][mount["subPath"]])

    def _start(
        self, container: dict[str, Any], index: int, place: tuple[str, str, str, str], files: Path
    ) -> Running:
        network, host, hosts, folder = place
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        assert words[0] == "elasticflow"
        (trainer,) = self.template()["spec"]["containers"]
        run_id = trainer["command"][trainer["command"].index("--run-id") + 1]
        job = self.manifest["Job"]["metadata"]["name"]
        of_pod = {each["name"]: self._value(each) for each in container["env"]}
        environment = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host, **of_pod}
        kept = {name: os.environ[name] for name in ("PATH", "TESTS_PROCESS", "LANG") if name in os.environ}
        output = self.root / f"output-{network}.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", network),
                    *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("sh", "-c", _BEGIN, "sh", host, hosts, folder, trainer["workingDir"]),
                    *(sys.executable, "-m", "elasticflow", *words[1:]),
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env={**kept, "PYTHONPATH": str(ROOT), **environment},
            )
        return Running(process, RunFolder.of(files, job, run_id), output)

    def _value(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        place = variable["valueFrom"]["secretKeyRef"]
        return self.secrets[place["name"], place["key"]]

    def _tell_names(self) -> None:
        text = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in self._names.items()
        )
        for path in self.root.glob("hosts-*"):
            path.write_text(text)

    def follows(self, code: int, *, is_disrupted: bool = False) -> str:
        """Return what the Job's podFailurePolicy has follow when a pod ends with *code*: the first rule that fits."""
        for rule in self.manifest["Job"]["spec"]["podFailurePolicy"]["rules"]:
            if is_disrupted and "onPodConditions" in rule:
                return str(rule["action"])
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Count"


def _first_process(pid: int) -> list[psutil.Process]:
    """Return the child of `unshare`, which is the first process of the new process tree."""
    found = psutil.Process(pid).children()
    return found[:1]
