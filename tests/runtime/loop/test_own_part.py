"""The part of a step that is a rank's own, in a loop that a script writes: until it has its batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

SCRIPT = """
import json, time
import elasticflow, torch
from elasticflow.runtime.measuring import own_time
from elasticflow.runtime.process.context import Worker

own_time.WINDOW_S = 0.5
told = []
Worker._report_figures = lambda self, times: told.append(times.own_s)

class Slow:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4)

def mean(model, data):
    time.sleep(0.2)
    return model(data).square().mean()

run = elasticflow.join(name="own", folder="run", threads=1{options})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
for batch in run.batches(Slow(), size=4, epochs=1):
    optimizer.zero_grad()
    {gradients}
    optimizer.step()
    run.step(loss=loss)
print(json.dumps(told))
run.finish()
"""
OWN = "loss = mean(model, batch.data); loss.backward()"
OURS = "loss = run.gradients(lambda part: mean(model, part.data), batch)"


@pytest.mark.parametrize(
    ("options", "gradients", "least", "most"),
    [("", OWN, 0.04, 0.2), (", gradients=elasticflow.Gradients()", OURS, 0.24, 2.0)],
    ids=["the script's own exchange", "run.gradients"],
)
def test_own_part(
    plain_python: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
    options: str,
    gradients: str,
    least: float,
    most: float,
) -> None:
    """Reading counts in any case; computing does if it is elasticflow that exchanges the gradients."""
    script = SCRIPT.replace("{options}", options).replace("{gradients}", gradients)
    (tmp_path / "train.py").write_text(script)
    told = json.loads(plain_python("train.py").stdout.splitlines()[-1])
    assert told
    assert all(least <= own_s < most for own_s in told)
