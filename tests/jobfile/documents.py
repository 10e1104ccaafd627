"""TOML documents that nobody thought of, and the leaves of what they mean."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tomli
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.positions import KeyPath, Spot

KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.dates(), st.times(), TEXTS
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


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


def assert_spot_is(text: str, spot: Spot, path: KeyPath, leaf: object) -> None:
    """The span of a value parses to the value alone, and that of a key to the key."""
    if spot.value is not None:
        assert repr(leaf) == repr(tomli.loads(f"v = {text[slice(*spot.value)]}")["v"]), text
    if spot.key is not None and isinstance(path[-1], str):
        assert {path[-1]: 1} == tomli.loads(f"{text[slice(*spot.key)]} = 1"), text


def quoted(text: str) -> str:
    """Return a text in double quotes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def written(value: object, style: int = 0) -> str:
    """Return a value as TOML, tables inline; *style* chooses among the ways to write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        is_plain = value.isprintable() and "'" not in value
        if style % 3 == 1 and is_plain:
            return f"'''\n{value}\\\n'''" if style % 2 else f"'{value}'"
        if style % 3 == 2:
            body = quoted(value)[1:-1].replace("\\n", "\n")
            return f'"""\n{body}"""'
        return quoted(value)
    if isinstance(value, list):
        comma = ", # a comment, with ] and }\n  " if style % 2 else ", "
        return f"[ {comma.join(written(each, style) for each in value)} ]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{quoted(key)} = {written(each)}' for key, each in value.items())} }}"
    return value.isoformat() if hasattr(value, "isoformat") else repr(value)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Return a valid document with tables, arrays of tables, dotted keys and comments."""
    lines = [
        f"{quoted(key)} = {written(value)}"
        for key, value in draw(st.dictionaries(KEYS, SCALARS, max_size=2)).items()
    ]
    for number, table in enumerate(draw(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=4))):
        name, sub = f"table{number}", quoted(draw(KEYS))
        style = draw(st.integers(0, 5))
        lines.append([f"[ {name} . {sub} ] # comment = 1", f"[{name}]", f"[[{name}.{sub}]]"][style % 3])
        for key, value in table.items():
            left = [quoted(key), f"dotted . {quoted(key)}"][style // 3]
            lines.append(f"{left}\t= {written(value, style)}")
    end = draw(st.sampled_from(["\n", "", "\n\n# the end"]))
    return "\n".join(lines) + end
