"""The numbers of one step that all ranks add up."""

from __future__ import annotations

import pytest
import torch

from elasticflow.runtime.process.votes import NUM_REQUESTS
from elasticflow.runtime.training.step_row import ROW_SIZE, StepRow

REQUESTS = [float(number == 3) for number in range(NUM_REQUESTS)]


def test_a_sum_of_rows_is_the_row_of_the_sums() -> None:
    """Each number comes back where it was, whether there are as many scalars as places or fewer, and extra numbers follow."""
    rows = [
        StepRow(1.5, 2.0, REQUESTS, [3.0, 4.0], [5.0]),
        StepRow(0.5, 1.0, scalars=[1.0, 1.0], extra=[1.0]),
    ]
    sums = [sum(pair) for pair in zip(*(row.to_numbers() for row in rows), strict=True)]
    assert len(sums) == ROW_SIZE + 1
    row = StepRow.from_sums(sums)
    assert row[:3] == (2.0, 3.0, REQUESTS)
    assert (row.scalars[:2], {*row.scalars[2:]}, row.extra) == ([4.0, 5.0], {0.0}, [6.0])

    assert StepRow.from_sums(rows[0].to_numbers(places=2), places=2) == rows[0]


def test_tensors_are_written_beside_the_numbers() -> None:
    """So that a loss that lies on a GPU is never waited for."""
    row = StepRow(torch.tensor(2.5), 1.0, REQUESTS, [torch.tensor(3.5), 2.0])
    assert row.to_numbers(places=0)[-2:] == [0.0, 2.0]
    written = StepRow.from_sums(row.on(torch.device("cpu")).tolist())
    assert (written.loss, written.scalars[:2]) == (2.5, [3.5, 2.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_counts_are_not_rounded_where_code_of_the_job_has_set_a_default_dtype(dtype: torch.dtype) -> None:
    """Gradients are divided by them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        numbers = StepRow(0.0, 70_001.0).on(torch.device("cpu")).tolist()
    finally:
        torch.set_default_dtype(before)
    assert StepRow.from_sums(numbers).num_items == 70_001.0
