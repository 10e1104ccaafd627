"""Every key and value of a TOML document is found where it stands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.spec.positions import KeyPath, index, place

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path of every value that is no table and no array, and of every empty one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


def assert_every_leaf_is_found(text: str) -> None:
    """Each leaf's span parses to the leaf alone, and each key's span to the key."""
    raw = tomli.loads(text)
    spots = index(text)
    for path, leaf in leaves(raw) if raw else ():
        spot = spots[path]
        if spot.value is not None:
            assert leaf == tomli.loads(f"v = {text[slice(*spot.value)]}")["v"]
        if spot.key is not None:
            assert {path[-1]: 1} == tomli.loads(f"{text[slice(*spot.key)]} = 1")


@pytest.mark.parametrize("text", DOCUMENTS)
def test_leaves_of_every_kind_of_document_are_found(text: str) -> None:
    """Headers, arrays of tables, dotted and quoted keys, inline tables and long texts are walked rightly."""
    assert_every_leaf_is_found(text)


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), KEYS)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def written(value: object) -> str:
    """Return a value as TOML, tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[ {', '.join(written(each) for each in value)} ]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{quoted(key)} = {written(each)}' for key, each in value.items())} }}"
    return repr(value)


def quoted(text: str) -> str:
    """Return a text in double quotes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=4), max_size=4))
def test_leaves_of_any_document_are_found(tables: dict[str, dict[str, Any]]) -> None:
    """The index agrees with the parser on documents nobody thought of."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[ {quoted(name)} ] # comment = 1")
        lines += [f"{quoted(key)} = {written(value)}" for key, value in table.items()]
    assert_every_leaf_is_found("\n".join(lines))


def test_line_and_column_count_from_one_in_code_points() -> None:
    """A column counts characters, not bytes."""
    text = 'a = 1\n"größe" = 2\n'
    spot = index(text)["größe",]
    assert spot.value is not None
    assert place(text, spot.value.start) == (2, 11)
    assert place(text, 0) == (1, 1)
