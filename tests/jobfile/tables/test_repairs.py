"""Values that are nearly right: what was meant is computed, and is always right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.repairs import accepts, repaired, with_units
from elasticflow.jobfile.tables.type_descriptions import keys_at

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [(table, key) for table in Job.model_fields for key in keys_at((table,)) if table != "matrix"]
NEARLY: list[tuple[str, object, object]] = [
    ("train.epochs", "5", 5),
    ("train.epochs", [5], 5),
    ("train.epochs", 5.0, 5),
    ("train.epochs", "1k", 1000),
    ("train.epochs", "five", None),
    ("train.epochs", True, None),
    ("train.compile", "True", True),
    ("train.compile", "no", False),
    ("train.compile", 1, True),
    ("train.precision", "BF16", "bf16"),
    ("train.precision", "bfloat16", "bf16"),
    ("train.precision", 16, "fp16"),
    ("train.precision", "16-mixed", "fp16"),
    ("train.precision", "32-true", "fp32"),
    ("snapshots.every", "10 m", "10 min"),
    ("snapshots.every", "5k steps", "5000 steps"),
    ("snapshots.every", "500 iters", "500 steps"),
    ("snapshots.every", "every 2 Epochs", "2 epochs"),
    ("snapshots.every", "steps: 500", "500 steps"),
    ("snapshots.every", "1h30m", "90 min"),
    ("snapshots.every", "epoch", "1 epoch"),
    ("snapshots.every", {"steps": 500}, "500 steps"),
    ("snapshots.every", {"value": 10, "unit": "min"}, "10 min"),
    ("snapshots.grace", "00:01:00", "1 min"),
    ("snapshots.grace", "1-00:00:00", "24 h"),
    ("snapshots.grace", "500 ms", "0.5 s"),
    ("snapshots.staging_limit", "4gb", "4 GB"),
    ("snapshots.staging_limit", "4Gi", "4 GiB"),
    ("snapshots.keep", 3, {"last": 3}),
    ("snapshots.keep", "5000 steps", {"every": "5000 steps"}),
    ("snapshots.include", ["a.b:c", "d:e.f"], {"c": "a.b:c", "f": "d:e.f"}),
    ("evaluation.best", "accuracy", "max accuracy"),
    ("evaluation.best", "val_loss", "min val_loss"),
    ("evaluation.best", "max_f1", "max f1"),
    ("evaluation.best", {"metric": "wer", "mode": "min"}, "min wer"),
    ("evaluation.metrics", "shop:accuracy", {"accuracy": "shop:accuracy"}),
    ("nodes.nproc_per_node", "2", 2),
    ("nodes.nproc_per_node", -1, "auto"),
    ("nodes.nproc_per_node", "GPU", "gpu"),
    ("nodes.nproc_per_node", [0, 1], None),
    ("nodes.endpoint", "tcp://head:29400", "head:29400"),
    ("nodes.endpoint", "head", "head:29400"),
    ("model.entry", "shop.Net", "shop:Net"),
    ("model.entry", "./src/net.py:Net", "src.net:Net"),
    ("model.entry", "shop::Net", "shop:Net"),
    ("model.entry", "shop:Net()", "shop:Net"),
    ("model.args", "width=3, depth=2", {"width": 3, "depth": 2}),
    ("model.loss", "CrossEntropyLoss", "torch.nn.functional:cross_entropy"),
    ("model.loss", "mse", "torch.nn.functional:mse_loss"),
    ("optimizer.entry", "adamw", "torch.optim:AdamW"),
    ("optimizer.entry", "torch.optim.AdamW(lr=1e-3)", "torch.optim:AdamW"),
    ("optimizer.entry", "optim.SGD", "torch.optim:SGD"),
    ("lr_scheduler.entry", "cosine", "torch.optim.lr_scheduler:CosineAnnealingLR"),
    ("lr_scheduler.entry", "cosine_with_warmup", "elasticflow.schedules:warmup_cosine"),
    ("lr_scheduler.entry", "wsd", "elasticflow.schedules:warmup_stable_decay"),
    ("job.name", "my shop", "my-shop"),
    ("job.name", 7, "7"),
    ("job.path", "src", ["src"]),
    ("logging.level", "WARN", "warning"),
    ("dataset.tail", True, "drop"),
]


@pytest.mark.parametrize(("key", "value", "meant"), NEARLY)
def test_what_was_meant_is_found(key: str, value: object, meant: object) -> None:
    """In the spelling of the key, whatever tool the habit comes from."""
    path = tuple(key.split("."))
    assert not accepts(path)(value)
    assert repaired(path, value) == meant


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
    found = repaired(path, value)
    assert found is None or accepts(path)(found)


def test_a_bare_number_is_offered_with_two_units() -> None:
    """Steps before seconds where both do."""
    assert with_units(("snapshots", "every"), "500") == ["500 steps", "500 min"]
    assert with_units(("snapshots", "grace"), "30") == ["30 s", "30 min"]
    assert with_units(("snapshots", "staging_limit"), "4") == ["4 GiB", "4 MB"]
    assert with_units(("snapshots", "every"), "1") == ["1 step", "1 min"]
    assert with_units(("train", "epochs"), "3") == []


def test_what_is_off_is_left_out(tmp_path: Path) -> None:
    """-1, 0, "none" and false for a key that may be left out; never for one of two that must be given."""
    for line in ("clip_grad_norm = 0", 'clip_grad_norm = "none"', "clip_grad_norm = -1"):
        (tmp_path / "job.toml").write_text(f"[optimizer]\n{line}\n[train]\nepochs = -1\n")
        found = load_job(tmp_path / "job.toml").diagnostics
        helps = {
            each.line: each.help for each in found if each.code in {codes.OUT_OF_RANGE, codes.WRONG_TYPE}
        }
        assert helps == {2: "leave it out: it is off without it", 4: None}
