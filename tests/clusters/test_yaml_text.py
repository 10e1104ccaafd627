"""Our YAML is read back as what was written, by another library and by YAML 1.1, which Kubernetes reads."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticflow.clusters.yaml_text import Commented, yaml_documents

TEXTS = st.text(max_size=30) | st.sampled_from(
    ["yes", "No", "~", "null", "1e3", "0x1f", "2026-11-23", "a: b", "- a", "#", "&a", "*a", "!t", "%", "@", "`", "|",
     ">", "''", '"', "line\n", "two\nlines\n", " led\nby a blank\n", "tail \nblank\n", "\n", "a\n\nb\n", "a\n\n", "\t", "=", "<<"]
)  # fmt: skip
COMMENTS = st.text("ab #:\n", min_size=1, max_size=8).filter(str.strip)


def commented(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values with and without a comment above them."""
    return inner | st.builds(Commented, COMMENTS, inner)


VALUES = st.recursive(
    TEXTS | st.integers(-(10**9), 10**9) | st.booleans(),
    lambda inner: (
        st.lists(commented(inner), max_size=4) | st.dictionaries(TEXTS, commented(inner), max_size=4)
    ),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    """Return *value* without its comments."""
    match value:
        case Commented():
            return plain(value.value)
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
        case _:
            return value


@example({"a": "text\n\n", "b": Commented("\nafter a blank line", 1)})
@settings(max_examples=60)
@given(st.dictionaries(TEXTS, commented(VALUES), max_size=5))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    """Whatever the texts are, and wherever comments stand."""
    assert plain(value) == yaml.safe_load(yaml_documents(value))


def test_comments_stand_above_what_they_are_about() -> None:
    """Of a document, a key, an item of a list; they change nothing."""
    value = Commented(
        "first\nsecond",
        {
            "a": Commented("of a", 1),
            "b": [Commented("of an item", {"c": "yes", "d": []}), Commented("of x", "x")],
        },
    )
    text = yaml_documents(value, {"e": "several\nlines\n"})
    assert [
        *(
            "# first",
            "# second",
            "# of a",
            "a: 1",
            "b:",
            "# of an item",
            '- c: "yes"',
            "  d: []",
            "# of x",
            "- x",
        ),
        *("---", "e: |", "  several", "  lines"),
    ] == text.splitlines()
    assert [{"a": 1, "b": [{"c": "yes", "d": []}, "x"]}, {"e": "several\nlines\n"}] == list(
        yaml.safe_load_all(text)
    )
