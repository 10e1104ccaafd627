"""Writes objects as YAML with comments, for people who read a manifest before they apply it."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

# Texts that need no quotes in YAML 1.1 and 1.2: Kubernetes reads 1.1, in which `no` and `y` are booleans.
_PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null)$)[a-z/][a-z0-9_./-]*", re.IGNORECASE)


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    comment: str
    value: Any


def yaml_documents(*documents: Any) -> str:
    """Return *documents*, which consist of dicts, lists, texts, numbers and booleans, as one YAML file."""
    return "---\n".join(map(_document, documents))


def _document(document: Any) -> str:
    value = _with_comments(document, 0)
    if isinstance(document, Commented):
        value.yaml_set_start_comment(document.comment)
    yaml = YAML()
    yaml.width = sys.maxsize
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def _with_comments(value: Any, indent: int) -> Any:
    """Return *value* in the form in which ruamel.yaml writes it with its comments, at the column *indent*."""
    match value:
        case Commented():
            return _with_comments(value.value, indent)
        case dict():
            # A list has the indent of its key, as people write it.
            table = CommentedMap(
                (_text(key), _with_comments(item, indent + 2 * isinstance(without_comment(item), dict)))
                for key, item in value.items()
            )
            for key, item in value.items():
                _comment(table, key, item, indent)
            return table
        case list():
            items = CommentedSeq(_with_comments(item, indent + 2) for item in value)
            for number, item in enumerate(value):
                _comment(items, number, item, indent)
            return items
        case str():
            return _text(value)
        case _:
            return value


def _comment(parent: CommentedMap | CommentedSeq, key: str | int, item: Any, indent: int) -> None:
    if isinstance(item, Commented):
        # A blank line would become part of a text above it that ends in blank lines.
        comment = "\n".join(filter(str.strip, item.comment.split("\n")))
        parent.yaml_set_comment_before_after_key(key, before=comment, indent=indent)


def without_comment(item: Any) -> Any:
    """Return the value of *item*, which may have a comment above it."""
    return item.value if isinstance(item, Commented) else item


def _text(text: str) -> Any:
    if _PLAIN.fullmatch(text):
        return text
    first, *others = text.split("\n")
    # A block has no escapes, and its first line sets the indent.
    if others and first and not first[0].isspace() and all(map(str.isprintable, (first, *others))):
        return LiteralScalarString(text)
    return DoubleQuotedScalarString(text)
