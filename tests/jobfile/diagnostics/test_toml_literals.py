"""Values as the job file has them."""

from __future__ import annotations

from elasticflow.jobfile.diagnostics.toml_literals import to_toml


def test_values_as_toml() -> None:
    """Texts, numbers, lists and tables as the file format has them."""
    assert '{ a = [1, 2.5], b = "x\\"y", c = true }' == to_toml({"a": [1, 2.5], "b": 'x"y', "c": True})
