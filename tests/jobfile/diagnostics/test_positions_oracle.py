"""Positions of keys and values against toml-test's documents and against a parser of another make."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tomli
from hypothesis import given, settings

from elasticflow.jobfile.diagnostics.positions import line_and_column, spots_in
from tests.jobfile.documents import assert_spot_is, documents, leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = "https://github.com/toml-lang/toml-test"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return toml-test's valid documents: from a folder that TOML_TEST names, or fetched."""
    folder = Path(os.environ.get("TOML_TEST", ""))
    if not os.environ.get("TOML_TEST"):
        folder = tmp_path_factory.mktemp("toml-test")
        command = ["git", "clone", "--quiet", "--depth", "1", REPOSITORY, str(folder)]
        environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        if done.returncode:
            pytest.skip(
                f"toml-test cannot be fetched, a clone can be named by TOML_TEST: {done.stderr.strip()}"
            )
    files = sorted((folder / "tests" / "valid").rglob("*.toml"))
    assert len(files) > 150
    return files


def accepted(file: Path) -> str | None:
    """Return the text of a document as a job file is read, None where tomli refuses it."""
    text = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError:
        return None
    return text


@pytest.mark.integration
@pytest.mark.timeout(90)
def test_every_key_and_value_of_toml_test_is_found(corpus: list[Path]) -> None:
    """Each span of each valid document parses to its value or key alone, and each key of the parsed dict has one."""
    num_leaves = 0
    for file in corpus:
        text = accepted(file)
        if text is None:
            continue
        raw, spots = tomli.loads(text), spots_in(text)
        for path, leaf in leaves(raw) if raw else ():
            num_leaves += 1
            assert_spot_is(text, spots[path], path, leaf)
    assert num_leaves > 800


@pytest.mark.integration
@pytest.mark.timeout(90)
def test_places_in_toml_test_are_those_of_tree_sitter(corpus: list[Path]) -> None:
    """Where both parsers read a document, all keys and values stand where tree-sitter sees them."""
    compared = [assert_agrees(text) for file in corpus if (text := accepted(file)) is not None]
    assert sum(compared) > 150


@pytest.mark.integration
@settings(max_examples=200)
@given(documents())
def test_places_in_any_document_are_those_of_tree_sitter(text: str) -> None:
    """Arrays of tables, dotted and quoted keys, nested inline tables, texts over several lines, any characters."""
    assert_agrees(text)


def assert_agrees(text: str) -> bool:
    """Compare the places of all keys and values with tree-sitter's; False where it cannot read the document."""
    seen = oracle(text)
    if seen is None:
        return False
    ours = spots_in(text)
    keys = sorted(line_and_column(text, spot.key.start) for spot in ours.values() if spot.key is not None)
    values = {
        (*line_and_column(text, s.value.start), *line_and_column(text, s.value.end))
        for s in ours.values()
        if s.value
    }
    assert {tuple(each) for each in keys} <= seen[0], text
    assert values == seen[1], text
    return True


Places = tuple[set[tuple[int, ...]], set[tuple[int, ...]]]


def oracle(text: str) -> Places | None:
    """Return where each part of a key begins and where each value begins and ends, as tree-sitter reads the text."""
    tree_sitter = pytest.importorskip("tree_sitter")
    grammar = pytest.importorskip("tree_sitter_toml")
    data = text.encode("utf-8")
    tree = tree_sitter.Parser(tree_sitter.Language(grammar.language())).parse(data)
    if tree.root_node.has_error:
        return None
    offsets = Offsets(text)
    keys: set[tuple[int, ...]] = set()
    values: set[tuple[int, ...]] = set()
    for node in walk(tree.root_node):
        if node.type in {"bare_key", "quoted_key"}:
            keys.add(line_and_column(text, offsets.of(node.start_byte)))
        if node.parent is not None and is_value(node):
            begin, end = offsets.of(node.start_byte), offsets.of(node.end_byte)
            values.add((*line_and_column(text, begin), *line_and_column(text, end)))
    return keys, values


def is_value(node: Any) -> bool:
    """Return whether a node is a value: right of an equals sign, or an element of an array."""
    if node.type in {"comment", "bare_key", "quoted_key", "dotted_key"} or not node.is_named:
        return False
    return node.parent.type in {"pair", "array"}


def walk(node: Any) -> Iterator[Any]:
    """Yield a node and all below it."""
    yield node
    for each in node.children:
        yield from walk(each)


class Offsets:
    """Bytes of UTF-8 -> code points."""

    def __init__(self, text: str) -> None:
        self._starts = {}
        at = 0
        for number, character in enumerate(text):
            self._starts[at] = number
            at += len(character.encode("utf-8"))
        self._starts[at] = len(text)

    def of(self, byte: int) -> int:
        """Return the code point that begins at a byte."""
        return self._starts[byte]
