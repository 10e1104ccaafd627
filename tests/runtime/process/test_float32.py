"""Switches of float32 products, of torch's old and new interface, each in a process of its own: they are global."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("real_processes")

_FORKS = """
import json, os, sys, torch
from elasticflow.errors import JobKeyError
from elasticflow.runtime.measuring.speed import Measures
from elasticflow.runtime.process import environment, float32

def read(kind):
    device = torch.device(kind)
    kind_of_peak = Measures().kind(torch.nn.Linear(1, 1), float32.matmul_precision(device))
    return {**float32.precision_facts(device), "kind": kind_of_peak}

for statement in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            exec(statement)
            found = {kind: read(kind) for kind in ("cpu", "cuda")}
            assert environment.describe(torch.device("cpu")).items() >= float32.precision_facts(torch.device("cpu")).items()
        except JobKeyError as error:
            found = {"refused": error.message}
        print(json.dumps(found), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
_BACKENDS = "torch.backends."


def _found(statements: list[str]) -> list[dict[str, Any]]:
    """Return what is read after each statement; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", _FORKS, json.dumps(statements)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_spelling_is_read() -> None:
    """Torch's older getters raise at several of these; names and values are those of older snapshots all the same."""
    wanted = {
        "pass": ("highest", "True", "tf32", "tf32"),
        _BACKENDS + 'cuda.matmul.fp32_precision = "tf32"': ("high", "True", "tf32", "tf32"),
        f'{_BACKENDS}cudnn.conv.fp32_precision = "tf32"; {_BACKENDS}cudnn.rnn.fp32_precision = "ieee"':
            ("highest", "False", "tf32", "ieee"),
        _BACKENDS + 'fp32_precision = "tf32"': ("high", "True", "tf32", "tf32"),
        _BACKENDS + 'cudnn.fp32_precision = "ieee"': ("highest", "False", "ieee", "ieee"),
        _BACKENDS + 'cudnn.conv.fp32_precision = "ieee"': ("highest", "False", "ieee", "tf32"),
        'torch.set_float32_matmul_precision("high")': ("high", "True", "tf32", "tf32"),
        _BACKENDS + "cudnn.allow_tf32 = False": ("highest", "False", "ieee", "ieee"),
    }  # fmt: skip
    found = dict(zip(wanted, _found(list(wanted)), strict=True))
    for statement, (matmul, cudnn, conv, rnn) in wanted.items():
        facts = {
            "matmul_precision": matmul,
            "cudnn_tf32": cudnn,
            "conv_precision": conv,
            "rnn_precision": rnn,
        }
        assert found[statement]["cuda"] == {**facts, "kind": 2 if matmul == "highest" else 1}, statement


def test_what_counts_on_the_cpu() -> None:
    """OneDNN's switches; CUDA's say nothing there, unless by the older interface, which knows one for both."""
    usual = {"matmul_precision": "highest", "conv_precision": "ieee", "rnn_precision": "ieee", "kind": 2}
    statements = [
        f"{_BACKENDS}{of}.matmul.fp32_precision = {to!r}" for of, to in (("cuda", "tf32"), ("mkldnn", "bf16"))
    ]
    plain, of_cuda, of_cpu = _found(["pass", *statements])
    assert plain["cpu"] == of_cuda["cpu"] == usual
    assert of_cpu["cpu"] == {**usual, "matmul_precision": "medium", "kind": 1}


def test_a_key_sets_all_of_cudas_operations() -> None:
    """Matrix products, convolutions and recurrent layers, also after the job's own code has set one of them."""
    earlier = _BACKENDS + 'cudnn.conv.fp32_precision = "ieee"; '
    statements = [
        f"{before}float32.set_tf32(enabled={on})" for before in ("", earlier) for on in (True, False)
    ]
    on = {
        "matmul_precision": "high",
        "cudnn_tf32": "True",
        "conv_precision": "tf32",
        "rnn_precision": "tf32",
        "kind": 1,
    }
    off = {
        "matmul_precision": "highest",
        "cudnn_tf32": "False",
        "conv_precision": "ieee",
        "rnn_precision": "ieee",
        "kind": 2,
    }
    assert [found["cuda"] for found in _found(statements)] == [on, off, on, off]


def test_a_switch_that_wins_over_the_key_is_refused() -> None:
    """`torch.backends.fp32_precision` gives its value to each operation that has none."""
    (found,) = _found([_BACKENDS + 'fp32_precision = "tf32"; float32.set_tf32(enabled=False)'])
    text = 'train.tf32 = false, and the job\'s own code has set torch.backends.fp32_precision to "tf32"'
    assert found == {"refused": text}
