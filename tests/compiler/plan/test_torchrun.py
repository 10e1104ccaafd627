from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import Std

from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import (
    LaunchPlan,
    ScriptPlan,
    plan_job,
    script_plan,
    torchrun_command,
)
from elasticflow.compiler.plan.torchrun import C10D_CONF, arguments, store_options, variables
from elasticflow.compiler.torchrun_script import torchrun_script
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.launching import TorchrunTable
from elasticflow.jobfile.wording.foreign_names import DECIDED_ELSEWHERE
from elasticflow.system.units import parse_duration
from tests.compiler.jobs import make_job

# Fields of torch's LaunchConfig that no key of a job reaches.
UNTOUCHED = (
    *("run_id", "role", "event_log_handler", "signals_to_handle", "virtual_local_rank", "local_addr"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "start_method"),
)

# Options that torch 2.13 does not have.
SINCE_2_14 = {"log_line_prefix_template", "print_completion"}


def parsed(args: tuple[str, ...]) -> tuple[Any, str]:
    """Return torch's own LaunchConfig of an argv, and its training script."""
    from torch.distributed.run import config_from_args, get_args_parser

    given = get_args_parser().parse_args(list(args))
    config, _, command = config_from_args(given)
    assert config.logs_specs is not None
    if given.log_dir is None:  # torch has made a folder then, whether it is used or not (2.13)
        Path(config.logs_specs.root_log_dir).rmdir()
    return config, command[-1]


NAMES = st.text("abcXYZ019_ .-'\"$;&#\u00e9", min_size=1, max_size=12).filter(
    lambda name: name.strip(". ") != "" and name[0] != "-"
)
STREAMS = st.one_of(
    st.integers(0, 3).map(str),
    st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1, max_size=3).map(
        lambda streams: ",".join(f"{rank}:{which}" for rank, which in streams.items())
    ),
)
CONF = st.dictionaries(
    st.from_regex(r"[a-z_]{1,9}", fullmatch=True).filter(lambda key: key not in {"timeout", "rank"}),
    st.one_of(
        st.integers(-9, 10**9),
        st.floats(0, 1e6, allow_nan=False),
        st.booleans(),
        st.text("abc019_./:= -", min_size=1, max_size=9).filter(lambda text: text == text.strip()),
    ),
    max_size=3,
)
ENDPOINTS = st.builds(
    "{}:{}".format, st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65_535)
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Return valid jobs that differ in every key which reaches torchrun."""
    backend = draw(st.sampled_from(["c10d", "etcd-v2", "static"]))
    least = draw(st.integers(1, 65_536))
    conf = draw(CONF)
    values: dict[str, Any] = {
        "nodes__min": least,
        "nodes__max": least if backend == "static" else draw(st.integers(least, 65_536)),
        "nodes__nproc_per_node": draw(st.one_of(st.integers(1, 1024), st.sampled_from(["auto", "cpu"]))),
        "nodes__endpoint": draw(st.none() | ENDPOINTS) if backend == "c10d" else draw(ENDPOINTS),
        "restarts__budget": draw(st.integers(0, 10**6)),
        "snapshots__grace": draw(st.sampled_from(["1 s", "0.3 s", "1.5 min", "2 h", "90 s"])),
        "torchrun__rdzv_backend": backend,
        "torchrun__rdzv_conf": conf,
        "torchrun__start_method": draw(st.sampled_from(["fork", "spawn"])),
        "torchrun__monitor_interval": draw(st.floats(1e-6, 60)),
        "torchrun__tee": draw(st.none() | STREAMS),
        "torchrun__redirects": draw(st.none() | STREAMS),
        "torchrun__local_ranks_filter": draw(
            st.none()
            | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(lambda r: ",".join(map(str, r)))
        ),
        "torchrun__numa_binding": draw(
            st.sampled_from([None, "node", "socket", "exclusive", "core-complex"])
        ),
        "torchrun__log_dir": draw(st.none() | NAMES),
    }
    return make_job(**{key: value for key, value in values.items() if value is not None})


def _streams(text: str | None) -> Any:
    if text is None:
        return Std.NONE
    if ":" not in text:
        return Std(int(text))
    return {int(rank): Std(int(which)) for rank, which in (each.split(":") for each in text.split(","))}


@given(jobs())
def test_torch_reads_back_what_any_job_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job
) -> None:
    """The parser of torch makes of the argv, as of the file it is kept in, the configuration that the job asks for."""
    monkeypatch.chdir(tmp_path)  # torch makes the log folder while it parses
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = arguments(job)
    assert list(argv) == "".join(f"{each}\n" for each in argv).split("\n")[:-1]  # torchrun.args
    config, entry_point = parsed(argv)
    nodes, table = job.nodes, job.torchrun
    assert (nodes.min, nodes.max) == (config.min_nodes, config.max_nodes)
    assert nodes.nproc_per_node in {config.nproc_per_node, "auto", "cpu"}
    assert (table.rdzv_backend, nodes.endpoint or "localhost:0") == (
        config.rdzv_backend,
        config.rdzv_endpoint,
    )
    ours = dict(C10D_CONF) if table.rdzv_backend == "c10d" else {}
    said = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in {**ours, **table.rdzv_conf}.items()
    }
    added = {"timeout": 900, **({"rank": 0} if table.rdzv_backend == "static" else {})}
    assert {**said, **added} == config.rdzv_configs
    grace_s = math.ceil(parse_duration(job.snapshots.grace))
    assert (job.restarts.budget, table.monitor_interval, grace_s) == (
        config.max_restarts,
        config.monitor_interval,
        config.shutdown_timeout,
    )
    numa = config.numa_options and config.numa_options.affinity_mode.value
    assert table.numa_binding == numa
    logs = config.logs_specs
    assert (_streams(table.redirects), _streams(table.tee)) == (logs._redirects, logs._tee)
    ranks = table.local_ranks_filter and {int(rank) for rank in table.local_ranks_filter.split(",")}
    assert ranks == logs._local_ranks_filter
    assert table.log_dir is None or (tmp_path / table.log_dir).is_dir()
    assert entry_point == "train.py"
    untouched, _ = parsed(("train.py",))
    assert [getattr(untouched, name) for name in UNTOUCHED] == [getattr(config, name) for name in UNTOUCHED]


def test_every_option_of_torchrun_is_taken_or_refused_by_name() -> None:
    """A new torch's option is noticed here: each is a key of [torchrun], or somebody else decides it."""
    from torch.distributed.run import get_args_parser

    options = {action.dest for action in get_args_parser()._actions} - {"help"}
    taken = set(TorchrunTable.model_fields)
    assert taken & DECIDED_ELSEWHERE.keys() == set()
    assert options | SINCE_2_14 == taken | DECIDED_ELSEWHERE.keys()


@pytest.mark.parametrize("option", [*DECIDED_ELSEWHERE, "max-restarts"])
def test_who_decides_an_option_is_told(tmp_path: Path, option: str) -> None:
    """An option under [torchrun] that is no key of it: the help says what to write instead, or why nothing."""
    (tmp_path / "job.toml").write_text(f"[torchrun]\n{option} = 1\n")
    found = [each for each in load_job(tmp_path / "job.toml").diagnostics if each.line == 2]
    assert [(codes.UNKNOWN_KEY, DECIDED_ELSEWHERE[option.replace("-", "_")])] == [
        (each.code, each.help) for each in found
    ]


@pytest.mark.parametrize(
    "line",
    [
        'local_ranks_filter = "all"',
        'log_dir = ""',
        'log_dir = "--"',
        'log_dir = "a\\nb"',
        'rdzv_conf = { a = "b,c" }',
        'rdzv_conf = { "a=b" = 1 }',
        'rdzv_conf = { a = "" }',
        'tee = "4"',
    ],
)
def test_what_torchrun_could_not_read_is_refused(tmp_path: Path, line: str) -> None:
    """A value that torchrun would stumble over, or take for another, is an error of the job file."""
    (tmp_path / "job.toml").write_text(f"[torchrun]\n{line}\n")
    assert [each for each in load_job(tmp_path / "job.toml").diagnostics if each.line == 2]


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


@pytest.mark.parametrize("key", ["entry", "module"])
def test_arguments_of_a_script_are_no_options_of_torchrun(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Torchrun alone refuses `--logs`: it could be short for `--logs-specs` and `--logs_specs`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tables = {"job": {"name": "own"}, "script": {key: "train", "args": ["--logs", "out", "--", "--max=3"]}}
    plan = script_plan(Job.model_validate(tables))
    assert plan is not None
    _, last = parsed((*arguments(make_job()), *torchrun_command(plan))[:-2])
    assert "out" == last


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


def test_the_device_type_is_told_to_every_process() -> None:
    """A process that does not see a GPU opens no context on it, also where each core has a worker; a type by name is checked by the workers."""

    def told(device: str, workers: int | str = 2) -> dict[str, str]:
        job = make_job(nodes__device=device, nodes__nproc_per_node=workers)
        found = {variable.name: variable.value for variable in variables(job)}
        return {name: value for name, value in found.items() if "DEVICE" in name}

    assert told("auto") == {}
    assert told("cuda") == {"ELASTICFLOW_DEVICE": "cuda"}
    on_cpu = {"ELASTICFLOW_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert told("cpu") == told("auto", "cpu") == on_cpu
    assert told("cuda", "cpu") == {"ELASTICFLOW_DEVICE": "cuda"}


def _plan(**changes: Any) -> LaunchPlan:
    return plan_job(make_job(), project_root=Path("/p"), job_files=[]).model_copy(update=changes)


@pytest.mark.usefixtures("real_processes")
def test_the_script_quotes_for_the_shell() -> None:
    """Values that a shell would split or expand arrive whole."""
    text = torchrun_script(
        _plan(
            torchrun_args=("--log-dir=a b$c", "train.py"),
            environment={"A": "x y"},
            reasons={"A": "why"},
            env={"B": "p q"},
            env_secrets=("S_KEY",),
        ),
        "..",
    )
    done = subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=100)
    assert done.returncode == 0
    assert f"    {shlex.quote('--log-dir=a b$c')}\n" in text
    assert "# why\nexport A='x y'\n" in text
    assert "# [env] of the job\nexport B='p q'\nexport S_KEY=\"${S_KEY:?set it" in text


@pytest.mark.usefixtures("real_processes")
def test_the_script_of_a_program_finds_its_further_folders(tmp_path: Path) -> None:
    """The folders of job.path are on the import path of the program, as they are under `elasticflow run`."""
    train = ScriptPlan(
        entry="train.py", module=None, args=(), path=("my lib", "/of all"), silence_s=None, log_every=1
    )
    text = torchrun_script(_plan(torchrun_args=("train.py",), script=train, environment={}), "..")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "torchrun.sh").write_text(text.replace("exec ", "echo "))
    done = subprocess.run(
        ["bash", "-c", ". launch/torchrun.sh; echo; printenv PYTHONPATH"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": "/before"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    root = tmp_path.resolve()
    assert done.stdout.splitlines()[-1] == f"/before:{root}/my lib:/of all"


def test_static_rendezvous_asks_for_the_nodes_number() -> None:
    """With the static back-end each node says its own number."""
    text = torchrun_script(_plan(torchrun_args=("--rdzv-backend=static", "train.py")), "..")
    assert '--node-rank="${NODE_RANK:?' in text


@pytest.mark.timeout(600)
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
    materialize(folder, launch_files(plan, job, folder, project_root=tmp_path, entry_point=entry_point))
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
            timeout=300,
        )
        workers = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda w: w["RANK"])
        assert [w["RANK"] for w in workers] == ["0", "1"]
        for worker in workers:
            assert worker["ELASTICFLOW_RUN_ID"] == worker["TORCHELASTIC_RUN_ID"] == run_id
            assert worker["ELASTICFLOW_RUN_FOLDER"] == str(folder)
            assert worker["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == worker["OMP_NUM_THREADS"] == "1"
