"""Switches of float32 products, of torch's old and new interface, each in a fork of its own: they are global."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.forked import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("real_processes")

_BEGIN = """
import json, torch
from elasticflow.errors import JobKeyError
from elasticflow.runtime.measuring.speed import Measures
from elasticflow.runtime.process import environment, float32
said = []

def read(kind):
    device = torch.device(kind)
    kind_of_peak = Measures().kind(torch.nn.Linear(1, 1), float32.matmul_precision(device))
    return {**float32.precision_facts(device), "kind": kind_of_peak}
"""
_READ = """
try:
    %s
    said += [{kind: read(kind) for kind in ("cpu", "cuda")}]
    assert environment.describe(torch.device("cpu")).items() >= float32.precision_facts(torch.device("cpu")).items()
except JobKeyError as error:
    said = [{"refused": error.message}]
"""
_BACKENDS = "torch.backends."


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """Yield an interpreter whose switches are torch's own; warnings are errors."""
    started = Interpreter(_BEGIN, "-W", "error")
    yield started
    started.close()


def _found(interpreter: Interpreter, statements: list[str]) -> list[dict[str, Any]]:
    """Return what is read after each statement."""
    return [found for statement in statements for found in interpreter.said(_READ % statement)]


def test_every_spelling_is_read(interpreter: Interpreter) -> None:
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
    found = dict(zip(wanted, _found(interpreter, list(wanted)), strict=True))
    for statement, (matmul, cudnn, conv, rnn) in wanted.items():
        facts = {
            "matmul_precision": matmul,
            "cudnn_tf32": cudnn,
            "conv_precision": conv,
            "rnn_precision": rnn,
        }
        assert found[statement]["cuda"] == {**facts, "kind": 2 if matmul == "highest" else 1}, statement


def test_what_counts_on_the_cpu(interpreter: Interpreter) -> None:
    """OneDNN's switches; CUDA's say nothing there, unless by the older interface, which knows one for both."""
    usual = {"matmul_precision": "highest", "conv_precision": "ieee", "rnn_precision": "ieee", "kind": 2}
    statements = [
        f"{_BACKENDS}{of}.matmul.fp32_precision = {to!r}" for of, to in (("cuda", "tf32"), ("mkldnn", "bf16"))
    ]
    plain, of_cuda, of_cpu = _found(interpreter, ["pass", *statements])
    assert plain["cpu"] == of_cuda["cpu"] == usual
    assert of_cpu["cpu"] == {**usual, "matmul_precision": "medium", "kind": 1}


def test_a_key_sets_all_of_cudas_operations(interpreter: Interpreter) -> None:
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
    assert [found["cuda"] for found in _found(interpreter, statements)] == [on, off, on, off]


def test_a_switch_that_wins_over_the_key_is_refused(interpreter: Interpreter) -> None:
    """`torch.backends.fp32_precision` gives its value to each operation that has none."""
    (found,) = _found(interpreter, [_BACKENDS + 'fp32_precision = "tf32"; float32.set_tf32(enabled=False)'])
    text = 'train.tf32 = false, and the job\'s own code has set torch.backends.fp32_precision to "tf32"'
    assert found == {"refused": text}
