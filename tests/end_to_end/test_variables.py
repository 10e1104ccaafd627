"""Variables of [env] are there before torch and the job's modules are imported, in every generation; secret ones never get out.

The job tries to let its secret out wherever it can, and prints more than a log may hold.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.agent import worker_streams
from tests.end_to_end.harness import named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# A module of torch that the fork server imports reads the second variable; the job's module reads the others.
MODULE = """
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch.fx.experimental._config as torch_config
from elasticflow import get_logger
from examples.mnist import Net as Plain

SEEN = {name: os.environ.get(name) for name in ("HF_HOME", "SOME_TOKEN", "GREETING")}
AT_IMPORT = torch_config.translation_validation_timeout
TOKEN, GREETING = SEEN["SOME_TOKEN"], SEEN["GREETING"]
print("imported with", TOKEN, GREETING)


def let_out():
    print(TOKEN, GREETING)
    print(SEEN, file=sys.stderr)
    sys.stdout.buffer.write(f"raw {TOKEN} {GREETING}\\n".encode())
    logging.getLogger("mine").warning("token %s for %r", TOKEN, GREETING)
    logging.getLogger("torch.distributed").error("peer at https://me:%s@host/", TOKEN)
    warnings.warn(f"{GREETING} is deprecated")
    get_logger().info("login", user=GREETING, headers={"auth": [TOKEN]}, api_key=" ".join(("not", "known to anybody")))
    try:
        raise KeyError(TOKEN)
    except KeyError:
        get_logger().exception(f"no {GREETING}")
        logging.getLogger("mine").exception("no token")


class Net(Plain):
    def __init__(self, width=8):
        super().__init__(width)
        generation = os.environ["ELASTICFLOW_GENERATION"]
        Path(__file__).with_name(f"seen-{generation}.json").write_text(json.dumps([SEEN, AT_IMPORT]))
        let_out()
        if generation == os.environ["FIRST"]:
            for _ in range(80):
                print("\\n".join(["x" * 1000] * 1000))
        else:
            token = TOKEN
            raise ValueError(f"{token} is refused by https://{GREETING}@host/?token={token}")
"""
SECRETS = ("a-secret-that-no-record-holds", "/gänzlich geheim?/")  # of the test
COMMANDS = ("why", "status", "report", "logs", "metrics")


def test_workers_have_the_jobs_variables_and_keep_secrets(project: Project) -> None:
    """Also after a kill; secrets are in no file of the run, whatever the job does, and in nothing that commands tell of it."""
    project.write("named.py", MODULE)
    lines = """
[env]
HF_HOME = "/somewhere"
TORCHDYNAMO_TRANSLATION_VALIDATION_TIMEOUT = "7"
SOME_TOKEN = "${env:MY_SECRET}"
GREETING = { value = "${env:MY_GREETING}", secret = true }
FIRST = "1"
"""
    job = project.root / "jobs" / "mnist.toml"
    job.write_text(f"{job.read_text()}\n{lines}")
    sets = ("model.entry=named:Net", "model.args.width=8", "train.epochs=100", "nodes.nproc_per_node=1")
    secret = {"MY_SECRET": SECRETS[0], "MY_GREETING": SECRETS[1]}
    running = project.run("jobs/mnist.toml", "variables", *sets, **secret)
    running.wait_for_step(3)
    first = running.state()["generation"]
    running.wait_for("what was left out", lambda: named(running.events(), events.LOG_LEFT_OUT))
    os.kill(running.pid_of(0), signal.SIGKILL)
    assert running.end() == 1, running.told()

    for generation in (first, first + 1):
        seen = json.loads((project.root / f"seen-{generation}.json").read_text())
        assert seen == [{"HF_HOME": "/somewhere", "SOME_TOKEN": SECRETS[0], "GREETING": SECRETS[1]}, 7]
    told = [project.call(name, "variables") for name in COMMANDS]
    texts = [path.read_bytes() for path in running.run.path.rglob("*") if path.is_file()]
    texts += [text.encode() for text in (running.told(), *(each.stdout + each.stderr for each in told))]
    forms = [form.encode() for text in SECRETS for form in (text, json.dumps(text)[1:-1])]
    assert [] == [form for form in forms for text in texts if form in text]
    assert not any(b"not known to anybody" in text for text in texts)

    log = read_lines(running.run.rank_log(first, 0))
    records = {(line.get("logger") or line.get("origin"), line["level"]) for line in log if line["step"] == 0}
    assert {
        ("mine", "warning"),
        ("mine", "error"),
        ("torch.distributed", "error"),
        ("py.warnings", "warning"),
    } <= records
    killed, failed = named(running.events(), events.WORKER_FAILED)
    assert "SIGKILL" in killed["error"]
    assert failed["exception"]["frames"][0]["function"] == "__init__"
    assert failed["exception"]["frames"][0]["is_own"] is True
    assert "*** is refused by https://***@host/?token=***" in failed["error"]

    left_out = named(running.events(), events.LOG_LEFT_OUT)[-1]
    printed = running.run.rank_log(first, 0, "stdout")
    assert ("stdout", 0) == (left_out["stream"], left_out["rank"])
    assert printed.stat().st_size <= worker_streams.MOST_BYTES
    kept = sum(line.endswith(b"x") for line in printed.read_bytes().splitlines())
    assert 0 < left_out["lines"] <= 80_000 - kept
