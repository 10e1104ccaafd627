"""Every key and value of a TOML document is found where it stands."""

from __future__ import annotations

import pytest
import tomli
from hypothesis import given, settings

from elasticflow.jobfile.diagnostics.positions import Span, line_and_column, spots_in
from tests.jobfile.documents import assert_spot_is, documents, leaves

DOCUMENTS = [
    'a = 1\n[b]\nc = "x"  # comment\n[b.d]\ne = [1, [2, 3], {f = 4}]\n',
    "[[t]]\nn = 1\n[[t]]\nn = 2\n[t.sub]\nm = 3\n[[t.inner]]\nk = 4\n",
    'a.b.c = 1\na.b.d = { e.f = 2, "g h" = 3 }\n',
    '"quo\\"ted" = 1\n\'lite.ral\' = 2\n"\\u00e9" = 3\n"" = 4\n',
    'm = """\nline "one"\n[not.a.table]\n"""\nl = \'\'\'x = 1\n\'\'\'\ne = """ends with a quote""""\nn = 5\n',
    "d = 1979-05-27 07:32:00\nt = 07:32:00\nf = -1.5e+3\ni = inf\nh = 0xDEAD_beef\nb = true\n",
    "arr = [ # comment ]\n  1, # two\n  2,\n]\nafter = 3\n",
    "  [  spaced . out  ]  \n  key  =  'v'  \n",
    '"größe" = "日本"\nnext = 1\n',
    "[a]\n[a.b]\nx = 1\n[c]\n",
    "empty = {}\nnone = []\nlast = ''",
]


def assert_every_leaf_is_found(text: str) -> None:
    """Each leaf's span parses to the leaf alone, and each key's span to the key."""
    raw, spots = tomli.loads(text), spots_in(text)
    for path, leaf in leaves(raw) if raw else ():
        assert_spot_is(text, spots[path], path, leaf)


@pytest.mark.parametrize("text", DOCUMENTS)
def test_leaves_of_every_kind_of_document_are_found(text: str) -> None:
    """Headers, arrays of tables, dotted and quoted keys, inline tables and long texts are walked rightly."""
    assert_every_leaf_is_found(text)


@settings(max_examples=30)
@given(documents())
def test_leaves_of_any_document_are_found(text: str) -> None:
    """The index agrees with the parser on documents nobody thought of."""
    assert_every_leaf_is_found(text)


def test_two_tables_of_one_array_are_told_apart() -> None:
    """Each element of an array of tables has places of its own."""
    spots = spots_in("[[a]]\nx = 1\n[[a]]\nx = 2\n")
    assert [spots["a", number, "x"].value for number in (0, 1)] == [Span(10, 11), Span(22, 23)]


def test_line_and_column_count_from_one_in_code_points() -> None:
    """A column counts characters, not bytes."""
    text = 'a = 1\n"größe" = 2\n'
    spot = spots_in(text)["größe",]
    assert spot.value is not None
    assert line_and_column(text, spot.value.start) == (2, 11)
    assert line_and_column(text, 0) == (1, 1)
