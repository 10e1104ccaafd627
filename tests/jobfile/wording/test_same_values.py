"""Values of another type or spelling: the same value, as the key takes it, and no other one."""

from __future__ import annotations

import datetime as dt
import importlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.wording.foreign_names import ENTRIES
from elasticflow.jobfile.wording.same_values import accepts, same_value
from elasticflow.jobfile.wording.type_descriptions import keys_at

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [(table, key) for table in Job.model_fields for key in keys_at((table,)) if table != "matrix"]
SAME: list[tuple[str, object, object]] = [
    ("train.epochs", "5", 5),
    ("train.epochs", [5], 5),
    ("train.epochs", 5.0, 5),
    ("train.epochs", "five", None),
    ("train.epochs", True, None),
    ("train.epochs", 2.5, None),
    ("train.compile", "True", True),
    ("train.compile", "no", False),
    ("train.compile", 1, True),
    ("train.precision", "BF16", "bf16"),
    ("train.precision", "bfloat16", "bf16"),
    ("train.precision", "bf61", "bf16"),
    ("train.precision", 16, "fp16"),
    ("train.precision", "16-mixed", "fp16"),
    ("snapshots.every", "10 minuts", "10 minutes"),
    ("snapshots.every", "500 Steps", "500 steps"),
    ("snapshots.staging_limit", "4gb", "4 GB"),
    ("nodes.nproc_per_node", "2", 2),
    ("nodes.nproc_per_node", -1, "auto"),
    ("nodes.nproc_per_node", "GPU", "gpu"),
    ("nodes.nproc_per_node", [0, 1], None),
    ("model.entry", "shop.Net", "shop:Net"),
    ("model.entry", "./src/net.py:Net", "net:Net"),
    ("model.entry", "shop::Net", "shop:Net"),
    ("model.entry", "shop:Net()", "shop:Net"),
    ("model.entry", "bert-base-uncased", None),
    ("model.loss", "CrossEntropyLoss", "torch.nn.functional:cross_entropy"),
    ("optimizer.entry", "adamw", "torch.optim:AdamW"),
    ("optimizer.entry", "torch.optim.AdamW(lr=1e-3)", "torch.optim:AdamW"),
    ("optimizer.entry", "optim.SGD", "torch.optim:SGD"),
    ("lr_scheduler.entry", "cosine", "torch.optim.lr_scheduler:CosineAnnealingLR"),
    ("lr_scheduler.entry", "cosine_with_warmup", "elasticflow.schedules:warmup_cosine"),
    ("snapshots.grace", "00:01:00", "1 min"),
    ("slurm.time", "1-02:00:00", "26 h"),
    ("slurm.time", dt.time(4, 30), "270 min"),
    ("train.time_limit", "00:12:00:00", "12 h"),
    ("parallel.shard", "FULL_SHARD", "all"),
    ("parallel.shard", "HYBRID_SHARD", "node"),
    ("job.name", 7, "7"),
    ("job.path", "src", ["src"]),
    ("logging.level", "WARN", "warning"),
    ("dataset.tail", True, "drop"),
]
# What takes a decision: a unit, a side, a name.
OPEN: list[tuple[str, object]] = [
    ("snapshots.every", 500),
    ("snapshots.every", "500"),
    ("snapshots.every", "10 m"),
    ("snapshots.every", "5k steps"),
    ("snapshots.every", {"steps": 500}),
    ("snapshots.grace", "01:30"),
    ("snapshots.keep", 3),
    ("evaluation.best", "accuracy"),
    ("evaluation.metrics", ["shop:accuracy"]),
    ("nodes.endpoint", "tcp://head"),
    ("job.name", "my shop"),
]


@pytest.mark.parametrize(("key", "value", "same"), SAME)
def test_the_same_value_is_found(key: str, value: object, same: object) -> None:
    """In the type and spelling of the key."""
    path = tuple(key.split("."))
    assert not accepts(path, value)
    assert same_value(path, value) == same


@pytest.mark.parametrize(("key", "value"), OPEN)
def test_no_value_is_made_up(key: str, value: object) -> None:
    """What could mean something else is left to its author."""
    assert same_value(tuple(key.split(".")), value) is None


@pytest.mark.parametrize("key", ENTRIES)
def test_every_entry_without_a_module_is_there(key: str) -> None:
    """In torch, or in elasticflow."""
    for entry in ENTRIES[key].values():
        module, _, name = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@given(
    st.sampled_from(KEYS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["10 m", "1k", "a:b", "x=1"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=4,
    ),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_what_is_offered_is_right(path: tuple[str, str], value: object) -> None:
    """Whatever stands there, at any key."""
    found = same_value(path, value)
    assert found is None or accepts(path, found)


def test_what_is_off_is_left_out(tmp_path: Path) -> None:
    """-1, 0, "none" and false for a key that may be left out; never for one of two that must be given."""
    for line in ("clip_grad_norm = 0", 'clip_grad_norm = "none"', "clip_grad_norm = -1"):
        (tmp_path / "job.toml").write_text(f"[optimizer]\n{line}\n[train]\nepochs = -1\n")
        found = load_job(tmp_path / "job.toml").diagnostics
        helps = {
            each.line: each.help for each in found if each.code in {codes.OUT_OF_RANGE, codes.WRONG_TYPE}
        }
        assert helps == {2: "leave it out: it is off without it", 4: None}
