"""Steps after which nothing is due but their line in the log: `Run.step` looks at nothing else there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

SCRIPT = """
import elasticflow, torch
from torch.utils.data import TensorDataset
from elasticflow.runtime.snapshot.snapshots import Snapshots

looked = []
after_step = Snapshots.after_step
Snapshots.after_step = lambda self, position, **options: (
    looked.append(position.step) or after_step(self, position, **options)
)
run = elasticflow.join(name="quiet", folder="run", every="11 steps", threads=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(64, 4))
for batch in run.batches(data, size=4, epochs=3):
    optimizer.zero_grad()
    loss = model(batch.data[0]).square().mean() * batch.share
    loss.backward()
    if batch.end.step not in (29, 30):  # these two add to the gradients of step 31
        optimizer.step()
    run.log(twice=2.0 * loss.detach())
    run.step(loss=loss)
    assert run.position == batch.end
    if batch.end.step == 36:
        run.evaluate(data, loss=None, metrics={"one": lambda model, batch: torch.tensor(1.0)})
print(looked)
run.finish()
"""


def test_quiet_steps_are_told_and_what_is_due_is_done(
    plain_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    """Each step has its line, in order; snapshots are of the steps that are due, and most steps are quiet."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = plain_python("train.py")

    looked = json.loads(done.stdout.splitlines()[-1])
    logs = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and "rank" in path.name]
    lines = [json.loads(line) for path in logs for line in path.read_text().splitlines() if line[:1] == "{"]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 49))
    assert all(line["twice"] == pytest.approx(2 * line["loss"]) for line in steps)
    assert [line["step"] for line in lines if line["event"] == "snapshot.staged"] == [11, 22, 33, 44, 48]
    fixed, due, pending = {8, 16, 24, 32, 40, 48}, {11, 22, 33, 44}, {29, 30}
    assert fixed | due <= {*looked}
    assert len({*looked} | pending) < 48
