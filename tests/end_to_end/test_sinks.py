"""A run whose worker and then whose supervisor is killed, resumed: each sink has exactly the points of metrics.jsonl.

Beside them [notify] tells of it, each moment once, at an address that no file and no command line of the run has.

What CI installs is in the first story. The second one has the heavy ones and an MLflow server; it is run by hand where they
are installed: `pip install mlflow wandb trackio`.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.harness import named, read_lines
from tests.otlp_receiver import otlp_receiver
from tests.servers import free_port
from tests.webhook_receiver import SECRET, webhook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from tests.end_to_end.harness import Project, Running

CODE = """
import os, signal, time
import torch


def data():
    return [(torch.arange(4.0) + n, torch.tensor(n % 3)) for n in range(32)]


def again():
    return data()


def step(model, batch):
    inputs, targets = batch
    return {"loss": torch.nn.functional.cross_entropy(model(inputs / 32), targets), "gap": inputs.mean()}


def watch(context):
    context.log_scalar("norm", float(next(iter(context.model.parameters())).norm()))
    if context.step == 8 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if context.step == 16 and not os.path.exists("killed"):
        open("waits", "w").close()
        while True:
            time.sleep(1)
"""
JOB = """
[job]
name = "sent"
[model]
entry = "torch.nn:Linear"
args = {{ in_features = 4, out_features = 3 }}
step = "sent:step"
[optimizer]
entry = "torch.optim:SGD"
args = {{ lr = 0.1 }}
[dataset]
entry = "sent:data"
global_batch_size = 8
[evaluation]
entry = "sent:again"
every = "10 steps"
[hooks]
on_step = "sent:watch"
[train]
steps = 20
consistency = "exact"
virtual_shards = 1
[nodes]
nproc_per_node = 1
[snapshots]
every = "5 steps"
memory = "off"
[logging]
sinks = {sinks}
{tables}
"""
NOTIFY = """
[notify]
url = "${env:HOOK}"
format = "json"
[restarts]
budget = 1
"""
Points = list[tuple[int, float]]


def is_server_installed() -> bool:
    """Return whether mlflow is there with its server: `mlflow-skinny` has none."""
    try:
        return bool(version("mlflow")) and find_spec("flask") is not None
    except PackageNotFoundError:
        return False


def run_story(project: Project, sinks: list[str], tables: str, **environment: str) -> Running:
    """Run the job; kill its worker at step 8 and, once all sinks have all that is written, its supervisor at step 16."""
    project.write("sent.py", CODE)
    project.write("sent.toml", JOB.format(sinks=json.dumps(sinks), tables=tables))
    first = project.run("sent.toml", "r1", job="sent", **environment)
    first.wait_for("step 16", (project.root / "waits").exists)
    first.wait_for("all that is written to arrive", lambda: has_arrived(first.run, sinks))
    shown = [" ".join(process.cmdline()) for process in first.tree()]
    assert not any(part in line for part in SECRET.split("/") for line in shown)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    project.write("killed", "")
    second = project.start("resume", "r1", run_id="r1", job="sent", **environment)
    assert second.end() == 0, second.told()
    events = second.events()
    assert named(events, "sink.unsent") == named(events, "follower.lost") == []
    # It is evaluated on what it is trained on: the launch that begins says so, and none that resumes.
    (event,) = named(events, "overlap.found")
    assert (32, 32, 32) == (event["found"], event["looked_up"], event["compared"])
    leak = "32 of 32 evaluation samples looked up are in the training data"
    assert [True, False] == [leak in launch.told() for launch in (first, second)]
    return second


def has_arrived(run: RunFolder, sinks: list[str]) -> bool:
    """Return whether each sink's record says that it has everything, up to step 15, which was written."""
    if (
        not run.metrics.exists()
        or read_lines(run.metrics)[-1:] == []
        or read_lines(run.metrics)[-1]["step"] < 15
    ):
        return False
    for sink in sinks:
        try:
            position = json.loads((run.path / "sinks" / f"{sink}.json").read_text())["position"]
        except FileNotFoundError:
            return False
        here = (
            position["metrics"]["offset"],
            position["events"]["offset"],
            position["logged"].get("0", {}).get("here"),
        )
        if here[:2] != (run.metrics.stat().st_size, run.events.stat().st_size):
            return False
        if (here[2] or {}).get("on_step:norm", 0) < 16:
            return False
        if (
            sink in {"otlp", "mlflow", "prometheus"}
            and position["told"]["offset"] != run.events.stat().st_size
        ):
            return False
    return True


def measured(run: RunFolder) -> Points:
    """Return step and loss of each step, as metrics.jsonl has them."""
    lines = [line for line in read_lines(run.metrics) if "eval" not in line]
    assert list(range(1, 21)) == [line["step"] for line in lines]
    return [(line["step"], line["loss"]) for line in lines]


def in_tensorboard(run: RunFolder, tag: str) -> Points:
    """Return step and value of each scalar, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(each.step, each.value) for each in reader.Scalars(tag)]


def in_mlflow(uri: str, name: str) -> tuple[Points, Any]:
    """Return step and value of each metric, and the one run of the experiment."""
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sent")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, name)
    return sorted((each.step, each.value) for each in history), run


def in_wandb(run: RunFolder, name: str) -> Points:
    """Return step and value of each row in the offline files, one for each process, in order."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted((run.path / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_of(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record.FromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if name in row:
                found.append((int(json.loads(row["step"])), json.loads(row[name])))
    return found


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log behind W&B's header of 7 bytes; current wandb has no reader in Python."""
    block, header, begin, parts = 32768, 7, 7, []
    while begin + header <= len(data):
        left = block - begin % block
        if left < header:
            begin += left
            continue
        length, kind = struct.unpack_from("<HB", data, begin + 4)
        parts.append(data[begin + header : begin + header + length])
        begin += header + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def in_trackio(folder: Path, name: str) -> Points:
    """Return step and value of each row in trackio's database."""
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    connection.close()
    return [(step, values[name]) for step, text in rows if name in (values := json.loads(text))]


def single(points: Points) -> Points:
    """Return the values as TensorBoard keeps them, in single precision."""
    return [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in points]


def test_killed_and_resumed_each_sink_has_each_point_once(project: Project) -> None:
    """TensorBoard, Prometheus and an OTLP receiver tell what metrics.jsonl and events.jsonl do."""
    for module in ("tensorboard", "prometheus_client", "opentelemetry.proto"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    with otlp_receiver() as received, webhook(500, 429) as hook:
        tables = f'[logging.otlp]\nendpoint = "{received.endpoint}"\n{NOTIFY}'
        run = run_story(project, ["tensorboard", "prometheus", "otlp"], tables, HOOK=hook.url).run

    expected = measured(run)
    events = read_lines(run.events)
    assert single(expected) == in_tensorboard(run, "loss")
    assert [(0, 0), (5, 1), (15, 1)] == in_tensorboard(run, "elasticflow/restarts")
    assert [10, 20] == [step for step, _ in in_tensorboard(run, "eval/loss")]
    assert list(range(1, 21)) == [step for step, _ in in_tensorboard(run, "norm")]

    assert [value for _, value in expected] == [value for _, value in received.points["elasticflow.loss"]]
    assert [event["event"] for event in events] == [name for name, _ in received.events]
    assert {
        "service.name": "elasticflow",
        "elasticflow.job.name": "sent",
        "elasticflow.run.id": "r1",
    }.items() <= (received.resource.items())

    text = (run.path / "prometheus.prom").read_text()
    gauges = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert expected[-1][1] == gauges["elasticflow_loss"][0].value
    assert 1 == gauges["elasticflow_restarts"][0].value
    assert ["finished"] == [s.labels["state"] for s in gauges["elasticflow_run_state"] if s.value]

    assert ["budget_low", "first_restart", "finished"] == [body["event"] for body in hook.bodies]
    assert [0, 0, 0] == [body["restarts_left"] for body in hook.bodies]
    assert "rank 0: killed by SIGKILL" == hook.bodies[0]["error"]
    assert 0 == hook.bodies[-1]["exit_code"]
    assert [("notify.url", "127.0.0.1 answers 500 Internal Server Error: Cannot POST ***")] == [
        (event["sink"], event["error"]) for event in events if event["event"] == "sink.failed"
    ]
    kept = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(part.encode() in data for part in SECRET.split("/") for data in kept)


@pytest.mark.integration
def test_heavy_sinks_have_each_point_once_too(project: Project) -> None:
    """An MLflow server with sqlite, W&B's offline files, trackio's database."""
    for module in ("wandb", "trackio"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    if not is_server_installed():
        pytest.skip("mlflow is not installed, or without its server")
    uri, places = f"http://127.0.0.1:{free_port()}", project.root / "trackio"
    tables = f'[logging.mlflow]\nuri = "{uri}"\n[logging.wandb]\nmode = "offline"\n'
    server = start_mlflow(project.root, uri)
    try:
        await_answer(server, f"{uri}/health")
        run = run_story(project, ["mlflow", "wandb", "trackio"], tables, TRACKIO_DIR=str(places)).run
        losses, tracked = in_mlflow(uri, "loss")
    finally:
        server.terminate()
        server.wait()

    expected = measured(run)
    assert expected == losses
    assert ("FINISHED", "0.1") == (tracked.info.status, tracked.data.params["optimizer.args.lr"])
    assert expected == in_wandb(run, "loss")
    assert expected == in_trackio(places, "loss")


def start_mlflow(root: Path, uri: str) -> subprocess.Popen[bytes]:
    """Start an MLflow server with a database in *root*."""
    store = [
        "--backend-store-uri",
        f"sqlite:///{root / 'server.db'}",
        "--artifacts-destination",
        str(root / "art"),
    ]
    where = ["--host", "127.0.0.1", "--port", uri.rpartition(":")[2], "--workers", "1"]
    with (root / "server.txt").open("wb") as output:
        command = [sys.executable, "-m", "mlflow", "server", *store, *where]
        return subprocess.Popen(command, cwd=root, stdout=output, stderr=output)


def await_answer(server: subprocess.Popen[bytes], url: str) -> None:
    """Return once the server answers."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    wait_for(server, answers)


def wait_for(server: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    """Return once *is_so*; fail when the server ends before."""
    while not is_so():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.1)
