"""A batch cut between its rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticflow.runtime.data.rows import cut, has_rows, leaves


class Pair(NamedTuple):
    """A batch with names."""

    words: Tensor
    labels: Tensor


@given(st.integers(3, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_parts_put_together_are_the_batch(sizes: tuple[int, int]) -> None:
    """Tensors, dicts, tuples, named ones, lists of texts and of numbers are cut at the same row; all else stays whole."""
    n, at = sizes
    batch: Any = {
        "a": torch.arange(n),
        "b": (torch.rand(n, 2), [torch.rand(n)]),
        "c": list("abcdef"[:n]),
        "d": Pair(torch.arange(n), torch.arange(n)),
        "e": tuple(range(n)),
    }
    assert all(has_rows(leaf, n) for leaf in leaves(batch))
    beside = {"size": (224, 224), "total": 7, "scale": torch.tensor(2.0)}
    assert not any(has_rows(leaf, n) for leaf in leaves(beside))
    first, second = (cut({**batch, **beside}, n, *part) for part in ((0, at), (at, n)))
    assert torch.equal(batch["a"], torch.cat([first["a"], second["a"]]))
    assert torch.equal(batch["b"][0], torch.cat([first["b"][0], second["b"][0]]))
    assert torch.equal(batch["b"][1][0], torch.cat([first["b"][1][0], second["b"][1][0]]))
    assert batch["c"] == first["c"] + second["c"]
    assert isinstance(first["d"], Pair)
    assert (at, n - at) == (len(first["d"].words), len(second["d"].labels))
    assert batch["e"] == first["e"] + second["e"]
    assert all(first[key] is second[key] is value for key, value in beside.items())


def test_dicts_stay_what_they_are() -> None:
    """A class of dicts may be made by other arguments than a dict."""
    batch = defaultdict[str, Any](list, {"a": torch.arange(3)})
    part = cut(batch, 3, 0, 1)
    assert (type(part), part["a"].tolist(), part["b"]) == (defaultdict, [0], [])
    assert batch.keys() == {"a"}
