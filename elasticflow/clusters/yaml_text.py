"""Objects as YAML with comments: what is read by people before it is applied, which libraries that keep no comments cannot write."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Texts that YAML 1.1 and 1.2 read as themselves; every other one is quoted as JSON, which YAML contains.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
# A text of several lines stands as it is if nothing in it has to be escaped.
_BLOCK = re.compile(r"(?!\s)(?:[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\t]*\n)+(?<!\n\n)")

_ESCAPED = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    comment: str
    value: Any


def yaml_documents(*documents: Any) -> str:
    """Return *documents*, made of dicts, lists, texts, numbers and booleans, as one YAML file."""
    return "---\n".join("\n".join(_document(document)) + "\n" for document in documents)


def _document(document: Any) -> Iterator[str]:
    if isinstance(document, Commented):
        yield from _comment(document, 0)
        document = document.value
    if isinstance(document, dict | list) and document:
        yield from _lines(document, 0)
    else:
        yield _scalar(document)


def _comment(value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, Commented):
        for line in value.comment.splitlines():
            yield f"{' ' * indent}# {line}"


def _lines(value: dict[str, Any] | list[Any], indent: int) -> Iterator[str]:
    blank = " " * indent
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _comment(item, indent)
            # A list stands at its key's own indent, as people write it.
            yield from _entry(f"{blank}{_scalar(key)}:", item, indent, below_list=0)
        return
    for item in value:
        yield from _comment(item, indent)
        plain = item.value if isinstance(item, Commented) else item
        if isinstance(plain, dict) and plain:
            first, *rest = _lines(plain, indent + 2)
            yield f"{blank}- {first[indent + 2 :]}"
            yield from rest
        else:
            yield from _entry(f"{blank}-", plain, indent, below_list=2)


def _entry(head: str, item: Any, indent: int, *, below_list: int) -> Iterator[str]:
    value = item.value if isinstance(item, Commented) else item
    if isinstance(value, dict | list) and value:
        yield head
        yield from _lines(value, indent + (2 if isinstance(value, dict) else below_list))
    elif isinstance(value, str) and _BLOCK.fullmatch(value):
        yield f"{head} |"
        yield from (f"{' ' * (indent + 2)}{line}" if line else "" for line in value.splitlines())
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON writes what lies beyond 16 bits as two halves, which YAML does not join.
    return _ESCAPED.sub(_escape, json.dumps(value, ensure_ascii=False))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
