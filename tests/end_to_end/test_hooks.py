"""A job with hooks and scalars of its own: killed and resized, it has the bits and the numbers of one without hooks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.observe.worker_logs import read_logs
from elasticflow.protocol.points import read_points
from tests.end_to_end.harness import read_lines, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

VAE = """
import logging, os, random, signal, time, warnings
import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 4), nn.Sequential(nn.Dropout(0.2), nn.Linear(2, 16))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(16, generator=generator) for _ in range(64)]


def step(model, x):
    logging.getLogger("vae").warning("%d samples", len(x))
    warnings.warn("once in a process")
    out, mean, log_var = model(x)
    rec = F.mse_loss(out, x)
    kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
    return {"loss": rec + 0.1 * kl, "rec": rec, "kl": kl, "count": x.numel()}


def sample(context, n):
    pixels = context.model.decoder(torch.randn(n, 2))
    context.log_image("samples", pixels.sigmoid())
    context.log_text("mean", repr(pixels.mean().item()))
    random.random()


def watch(context):
    time.sleep(0.05)  # others continue meanwhile, and wait
    context.log_scalar("kl", context.metrics["kl"])
    if context.step == 8 and os.environ["DIES"] == "yes" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def note(context):
    context.log_scalar(context.hook, context.step)
"""
JOB = """
[job]
name = "vae"
[model]
entry = "vae:VAE"
step = "vae:step"
[optimizer]
entry = "torch.optim:AdamW"
args = {{ lr = 0.01 }}
clip_grad_norm = 1.0
[dataset]
entry = "vae:images"
args = {{ seed = 1 }}
global_batch_size = 8
[evaluation]
entry = "vae:images"
args = {{ seed = 2 }}
every = "5 steps"
[train]
steps = 12
consistency = "exact"
virtual_shards = 4
[snapshots]
every = "3 steps"
[nodes]
nproc_per_node = {workers}
{hooks}
"""
HOOKS = """
[hooks]
on_start = "vae:note"
on_step = "vae:watch"
on_evaluation = { entry = "vae:sample", args = { n = 3 } }
on_snapshot = { entry = "vae:note", all_ranks = true }
on_finish = "vae:note"
"""


def _require_warnings_told(project: Project, running: Running) -> None:
    """Each warning is on the console once, and counted over ranks and generations as often as the logs have it."""
    told = running.told()
    warned = {"UserWarning: once in a process": 4, "WARNING vae: 2 samples": 0}
    lines = [each for number in (1, 2) for each in read_logs(running.run, number)]
    warned["WARNING vae: 2 samples"] = sum(
        re.search(r'"event": "\d+ samples"', line.text) is not None for line in lines
    )
    assert warned["WARNING vae: 2 samples"] >= 24
    assert "2 warnings: elasticflow logs hooked --level warning" in told
    for command in ("status", "why"):
        asked = project.start(command, "hooked", run_id="hooked", job="vae")
        assert asked.end() == 0, asked.told()
        for text, times in warned.items():
            assert told.count(text) == 1, told
            assert f"{text} (rank " in asked.told()
            assert f", {times} times)" in asked.told()


def test_hooks_of_a_killed_run_leave_bits_and_each_point_once(project: Project) -> None:
    """Rank 0 is killed within a hook: weights and metrics are those of one worker without hooks; no point is lost or twice."""
    project.write("vae.py", VAE)
    runs = {}
    for name, hooks, workers in (("plain", "", 1), ("hooked", HOOKS, 2), ("whole", HOOKS, 3)):
        project.write(f"{name}.toml", JOB.format(hooks=hooks, workers=workers))
        dies = "yes" if name == "hooked" else "no"
        running = project.start("run", f"{name}.toml", "--run-id", name, run_id=name, job="vae", DIES=dies)
        assert running.end() == 0, running.told()
        runs[name] = running
    plain, hooked = runs["plain"].run, runs["hooked"].run
    assert tensors(plain) == tensors(hooked)
    keys = ("step", "loss", "rec", "kl", "count", "grad_norm", "eval")
    ours, theirs = (
        [{key: line.get(key) for key in keys} for line in read_lines(run.metrics)] for run in (hooked, plain)
    )
    assert ours == theirs
    _require_warnings_told(project, runs["hooked"])
    assert len([line for line in ours if line["kl"] is not None]) == 12

    points = read_points(hooked.path)
    told = [(p["step"], p["hook"], p["rank"], p["kind"]) for p in points]
    assert len(set(told)) == len(told)
    assert [p["step"] for p in points if p["hook"] == "on_step"] == list(range(1, 13))
    assert [p["value"] for p in points if p["hook"] == "on_step"] == [
        line["kl"] for line in ours if line["kl"]
    ]
    of_snapshots = [(p["step"], p["rank"]) for p in points if p["hook"] == "on_snapshot"]
    assert of_snapshots == [(step, rank) for step in (3, 6, 9, 12) for rank in (0, 1)]
    assert [p["step"] for p in points if p["hook"] == "on_start"] == [0, 6]
    assert [p["step"] for p in points if p["hook"] == "on_finish"] == [12]
    samples = [p["value"] for p in points if p["hook"] == "on_evaluation"]
    assert samples == [
        p["value"] for p in read_points(runs["whole"].run.path) if p["hook"] == "on_evaluation"
    ]
    assert len(samples) == 6
    assert all((hooked.path / path).read_bytes()[1:4] == b"PNG" for path in samples[::2])
