"""Nine forms of a training loop with a rank killed: each sample counts as often as it should, with the bits of a quiet run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "loop_forms.py"
# Step in which rank 1 is killed, the steps of the whole loop, epochs that were followed by something, and samples that counted.
FORMS = {
    "epochs": (22, 75, 8, 150 * 8),
    "phases": (35, 67, 0, 100 * 4 + 100 * 6),
    "trainer": (22, 75, 8, 150 * 8),
    "plateau": (30, 75, 8, 150 * 8),
    "accumulation": (23, 75, 0, 150 * 8),
    "gan": (22, 75, 0, 150 * 8),
    "scaler": (33, 75, 0, 150 * 8 - 3 * 16),
    "own_data": (22, 96, 8, 144 * 8),
    "early_stopping": (33, 40, 4, 150 * 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_loop_survives_a_kill(groups: Callable[..., Any], form: str) -> None:
    """Two workers, of which one is killed: the counts, and every bit, are those of two that were not disturbed."""
    killed_in, steps, epochs, samples = FORMS[form]
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert whole.run(2, form).codes == [0, 0]
    assert -9 in parts.run(2, form, f"--kill-at={killed_in}", ends=False).codes
    assert parts.run(2, form).codes == [0, 0]

    expected, got = whole.newest(), parts.newest()
    assert got.manifest.step == steps
    assert got.state["position"]["step"] == steps
    seen = [tensor for key, tensor in got.tensors.items() if key.endswith("seen")]
    assert [float(each.sum()) for each in seen] == pytest.approx([samples] * len(seen))
    assert [key for key in expected.tensors if not torch.equal(expected.tensors[key], got.tensors[key])] == []
    assert expected.state["state"] == got.state["state"]
    assert f"'epochs': {epochs}" in str(got.state["state"])
