"""One `--set key=value` -> the layer it contributes."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import at
from elasticflow.jobfile.diagnostics.positions import Span, Spot, index
from elasticflow.jobfile.text.layers import Layer
from elasticflow.jobfile.text.read import MOST_LEVELS, UnreadableError, depth

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.positions import KeyPath

_KEY_PART = r"""[ \t]*(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
_ASSIGNMENT = re.compile(rf"(?P<key>{_KEY_PART}(?:\.{_KEY_PART})*)=", re.DOTALL)
SHOWN = "--set"


def flag_layer(text: str) -> Layer:
    """Return the layer of one `--set`; an empty value takes the key out of what is below.

    Raises:
        UnreadableError: not of the form key=value, or no TOML value.
    """
    found = _ASSIGNMENT.match(text)
    if not found:
        remedy = "write --set key=value, for example --set train.epochs=3"
        raise _unreadable(codes.BAD_SET, "not of the form key=value", text, 0, remedy)
    start = found.end()
    value = text[start:].strip()
    spots = index(f"{found[0]}0")
    path = max(spots, key=len)
    names = tuple(str(name) for name in path)
    if not value:
        return Layer(SHOWN, text, {}, dict, removes=names)
    leaf = _leaf(text, value, start)
    raw: dict[str, Any] = {names[-1]: leaf}
    for name in reversed(names[:-1]):
        raw = {name: raw}

    def find_spots() -> dict[KeyPath, Spot]:
        known = dict(spots if isinstance(leaf, str) else index(text))
        known[path] = Spot(known[path].key, Span(start, len(text)))
        return known

    return Layer(SHOWN, text, raw, find_spots)


def _leaf(text: str, value: str, start: int) -> Any:
    import tomli

    try:
        parsed = tomli.loads(f"v = {value}")
    except (ValueError, RecursionError) as error:
        from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
        from elasticflow.jobfile.text.slips import mended

        if value[0] in "[{\"'":
            remedy = "quote it for your shell, for example --set 'dataset.args={ split = \"train\" }'"
            meant = mended(f"v = {value}", len("v = "))
            if meant is not None and meant.line.startswith("v = ") and "\n" not in meant.line:
                whole = shlex.quote(f"{text[:start].strip()}{mask_secrets(meant.line).removeprefix('v = ')}")
                remedy = f"write --set {whole} ({meant.why})"
            raise _unreadable(codes.BAD_SET, "the value is not valid TOML", text, start, remedy) from error
        return value  # a bare word: --set job.name=mnist
    if set(parsed) != {"v"}:
        return value
    if depth(parsed) > MOST_LEVELS:
        raise _unreadable(codes.NOT_TOML, "the value is nested too deeply", text, start)
    return parsed["v"]


def _unreadable(code: str, message: str, text: str, start: int, remedy: str | None = None) -> UnreadableError:
    return UnreadableError(
        at(code, message, file=SHOWN, text=text, span=Span(start, len(text)), remedy=remedy)
    )
