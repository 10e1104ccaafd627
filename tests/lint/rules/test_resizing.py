"""Checks that only some numbers of workers pass."""

from __future__ import annotations

import pytest

from tests.lint.scripts import codes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert batch % world_size == 0", ["EF604"]),
        ("assert steps % ddp_world_size == 0, 'must divide'", ["EF604"]),
        ("assert args.batch % dist.get_world_size() == 0", ["EF604"]),
        ("assert total % (B * T * ddp_world_size) == 0", ["EF604"]),
        ("micro = B * world_size\nassert total % micro == 0", ["EF604"]),
        ("assert not batch % args.world_size", ["EF604"]),
        ("assert 8 % world_size == 0", ["EF604"]),
        ("assert world_size == 8", ["EF604"]),
        ("assert dist.get_world_size() in (1, 2, 4, 8)", ["EF604"]),
        ("if batch % world_size != 0:\n    raise ValueError('must divide')", ["EF604"]),
        ("assert world_size % nproc_per_node == 0", []),
        ("assert get_world_size() % num_workers_per_machine == 0", []),
        ("args.batch = args.total // world_size\nassert args.batch % args.chunks == 0", []),
        ("assert padded_length % world_size == 0", []),
        ("assert config.num_processes == 4", []),
        ("assert world_size > 1", []),
        ("assert world_size == 1", []),
        ("assert rank < world_size", []),
        ("assert world_size == dist.get_world_size()", []),
        ("assert heads % tp_world_size == 0", []),
        ("assert heads % get_tensor_parallel_world_size() == 0", []),
        ("assert index % world_size == rank", []),
        ("print('%d' % world_size)", []),
        ("if step % world_size == 0:\n    log()", []),
        ("share = batch // world_size", []),
    ],
)
def test_checks_that_a_resize_breaks(body: str, expected: list[str]) -> None:
    """Divisibility and fixed numbers, of all workers; not of groups inside a model."""
    assert codes(body + "\n") == expected
