from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.materialize import materialize
from elasticflow.compiler.plan import plan_job
from elasticflow.compiler.torchrun import arguments, script, store_options, variables
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from pathlib import Path


def parsed(args: tuple[str, ...]) -> tuple[Any, str]:
    """Return torch's own LaunchConfig of an argv, and its training script."""
    from torch.distributed.run import config_from_args, get_args_parser

    config, _, command = config_from_args(get_args_parser().parse_args(list(args)))
    return config, command[-1]


def test_torch_reads_back_what_the_job_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parser of torch makes of the argv the configuration that the job asks for."""
    monkeypatch.chdir(tmp_path)  # torch makes the log folder while it parses
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = make_job(
        nodes__min=2,
        nodes__max=5,
        nodes__nproc_per_node=3,
        nodes__endpoint="head:29400",
        restarts__budget=7,
        snapshots__grace="1.5 min",
        torchrun__monitor_interval=0.25,
        torchrun__rdzv_conf={"join_timeout": 900, "use_libuv": True},
        torchrun__tee="3",
        torchrun__redirects="0:1,1:2",
        torchrun__local_ranks_filter="0,1",
        torchrun__numa_binding="node",
        torchrun__log_dir="torchrun logs",
    )
    config, entry_point = parsed(arguments(job))
    assert entry_point == "train.py"
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 5, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "head:29400", "none")
    assert config.rdzv_configs == {
        "last_call_timeout": "1",
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        "join_timeout": "900",
        "use_libuv": "true",
        "timeout": 900,
    }
    assert (config.max_restarts, config.shutdown_timeout, config.monitor_interval) == (7, 90, 0.25)
    assert config.numa_options.affinity_mode.value == "node"
    assert config.logs_specs._root_log_dir is None or "torchrun logs" in config.logs_specs._root_log_dir


def test_one_machine_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint torchrun takes a free port of this machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, _ = parsed(arguments(make_job()))
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")


@pytest.mark.parametrize("per_node", ["auto", "cpu", 2])
def test_workers_per_node(monkeypatch: pytest.MonkeyPatch, per_node: str | int) -> None:
    """The parser of torch accepts every value that nproc_per_node may have without a GPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, _ = parsed(arguments(make_job(nodes__nproc_per_node=per_node)))
    assert config.nproc_per_node >= 1


def test_the_users_rendezvous_configuration_wins() -> None:
    """A key of torchrun.rdzv_conf replaces ours."""
    conf = next(
        a for a in arguments(make_job(torchrun__rdzv_conf={"last_call_timeout": 9})) if "rdzv-conf" in a
    )
    assert conf == "--rdzv-conf=last_call_timeout=9,keep_alive_interval=1,keep_alive_max_attempt=3"


def test_other_backends_get_no_configuration_of_ours() -> None:
    """Of c10d's keys etcd knows none."""
    job = make_job(torchrun__rdzv_backend="etcd-v2", nodes__endpoint="etcd:2379")
    assert not [a for a in arguments(job) if "rdzv-conf" in a]


def test_what_etcd_is_talked_to_with_is_carried() -> None:
    """Torch's own keys for etcd say how our agents talk to it, too; others are torch's business."""
    conf = {"protocol": "https", "ca_cert": "/ca.pem", "read_timeout": 5}
    job = make_job(torchrun__rdzv_backend="etcd-v2", nodes__endpoint="etcd:2379", torchrun__rdzv_conf=conf)

    assert {"protocol": "https", "ca_cert": "/ca.pem"} == store_options(job)


@pytest.mark.parametrize(
    ("changes", "outside"),
    [
        ({}, False),
        ({"torchrun__rdzv_conf": {"is_host": False}}, True),
        ({"torchrun__rdzv_conf": {"is_host": 0}}, True),
        ({"torchrun__rdzv_conf": {"is_host": "true"}}, False),
        ({"torchrun__rdzv_backend": "etcd-v2"}, True),
        ({"torchrun__rdzv_backend": "static", "torchrun__rdzv_conf": {"is_host": False}}, False),
    ],
)
def test_store_is_outside_when_torchrun_would_not_serve_it(changes: dict[str, Any], outside: bool) -> None:
    """Torch's own key for c10d says so; etcd always is."""
    assert outside == make_job(**changes).torchrun.is_store_outside


def test_every_variable_has_a_reason() -> None:
    """No variable is set without a reason, and an interface is given to both back-ends."""
    found = variables(make_job(nodes__interface="eth1"))
    assert all(variable.reason for variable in found)
    values = {variable.name: variable.value for variable in found}
    assert values["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert values["GLOO_SOCKET_IFNAME"] == values["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.usefixtures("real_processes")
def test_the_script_quotes_for_the_shell() -> None:
    """Values that a shell would split or expand arrive whole."""
    text = script("small", ("--log-dir=a b$c", "train.py"), {"A": "x y"}, {"A": "why"})
    done = subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    assert done.returncode == 0
    assert f"    {shlex.quote('--log-dir=a b$c')}\n" in text
    assert "# why\nexport A='x y'\n" in text


def test_static_rendezvous_asks_for_the_nodes_number() -> None:
    """With the static back-end each node says its own number."""
    text = script("small", ("--rdzv-backend=static", "train.py"), {}, {})
    assert '--node-rank="${NODE_RANK:?' in text


@pytest.mark.e2e
def test_the_script_starts_torchrun_from_any_folder(tmp_path: Path) -> None:
    """The script, called from another folder, starts every worker with the run's variables."""
    job = make_job(dataset__entry="torch.utils.data:TensorDataset")
    folder = tmp_path / "launch folder"
    entry_point = (
        "import json, os, sys\n"
        "names = ['RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'ELASTICFLOW_RUN_ID', 'ELASTICFLOW_RUN_FOLDER']\n"
        "names += ['OMP_NUM_THREADS', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE']\n"
        "sys.stdout.write(json.dumps({name: os.environ[name] for name in names}) + '\\n')\n"
    )
    plan = plan_job(job, project_root=tmp_path, job_files=[tmp_path / "job.toml"])
    materialize(plan, job, folder, project_root=tmp_path, entry_point=entry_point)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICFLOW")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for run_id, extra in (("by-hand", {}), ("run-7", {"ELASTICFLOW_RUN_ID": "run-7"})):
        done = subprocess.run(
            ["bash", str(folder / "torchrun.sh")],
            cwd=elsewhere,
            env={**environ, "PYTHON": sys.executable, **extra},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        workers = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda w: w["RANK"])
        assert [w["RANK"] for w in workers] == ["0", "1"]
        for worker in workers:
            assert worker["ELASTICFLOW_RUN_ID"] == worker["TORCHELASTIC_RUN_ID"] == run_id
            assert worker["ELASTICFLOW_RUN_FOLDER"] == str(folder)
            assert worker["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == worker["OMP_NUM_THREADS"] == "1"
