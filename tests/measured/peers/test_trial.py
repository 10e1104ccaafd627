"""A trial ends as soon as its outcome is known, and none is made where a peer promises nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.measured.peers import trial as trials
from tests.measured.peers.__main__ import attempts, plan
from tests.measured.peers.peers import BY_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STAYS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[trials.Trial]:
    """A trial whose only launcher never ends by itself."""
    peer = replace(BY_KEY["torchrun"], command=lambda _: STAYS)
    with trials.Trial(peer, tmp_path, tmp_path / "trial", 1, 1, 2, "mlp", 4) as trial:
        trial.start()
        yield trial


def made(trial: trials.Trial, step: int, age_s: float = 0.0) -> None:
    """Record a step."""
    line = {"t": time.time() - age_s, "pid": 1, "step": step, "ids": []}
    (trial.records / "steps-1.jsonl").write_text(json.dumps(line) + "\n")


def test_a_trial_ends_soon_after_its_last_step(
    running: trials.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that outlives its workers is not waited for."""
    monkeypatch.setattr(trials, "END_S", 0.0)
    made(running, 400)
    assert not running.await_end(1e9, 400)


def test_a_trial_ends_after_a_time_without_a_step(running: trials.Trial) -> None:
    """Counted from the last step, or from the fault if that came later."""
    made(running, 150, age_s=1000.0)
    assert not running.await_end(0.1, 400)


@pytest.mark.parametrize("unpromised", [False, True])
def test_a_promise_that_nobody_made_is_tried_on_demand_alone(*, unpromised: bool) -> None:
    """Where the documentation says so, the page says it without a trial."""
    options = argparse.Namespace(
        peer=["torchrun:tuned", "lm-resiliency under torchrun:tuned"],
        fault=["worker", "half"],
        tries=1,
        unpromised=unpromised,
    )
    found = {(peer.name, fault) for peer, fault, _ in attempts(options, plan())}
    assert ("lm-resiliency under torchrun", "half") in found
    assert (("torchrun", "half") in found) is unpromised
