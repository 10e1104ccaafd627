"""The prose of docstrings: a sentence has a subject and a verb, and an entry says more than its name."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import elasticflow

ROOT = Path(elasticflow.__file__).parent
SECTIONS = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r"    (\*{0,2}[\w.]+)(?: \([^)]*\))?: (.*)")
# Words that begin a clause, where a reader expects the subject.
NO_SUBJECT = re.compile(r"(What|Whether|Of|How|Who|Whose|Where|Which|That|Those)\b")
COMMENT = re.compile(r"(?:^\s*|  )# (.*)")
NOT_IN_COMMENT = re.compile(r"# (What|Whether|Of|Who|Whose|Those|Else)\b")
NOT_IN_ENTRY = re.compile(r"(What|Of|Who|Whose|Those|Its|Their|The same\.)(\b|$)")
PRIVATE = re.compile(
    r"\b([Ss]omebody|[Nn]obody|that of another|those of others|(?<!there )is none|has (?:it|them|that|this) done|"
    r"be it|(?<!and )go on|goes on|went on|going on|gone on)\b|; named[.;]"
)
PRONOUNS = re.compile(
    r"\b(one|ones|those|it|its|that|each|they|them|their|other|others|another)\b", re.IGNORECASE
)
MOST_PRONOUNS = 5
FILLERS = {"the", "a", "an", "of", "its", "this", "it", "is", "in", "for", "that", "one"}


@dataclass(frozen=True)
class Docstring:
    """A docstring and its place."""

    place: str
    text: str

    def entries(self) -> Iterator[tuple[str, str, str]]:
        """Yield section, name and the first line of the text of each entry."""
        section = ""
        for line in self.text.splitlines():
            if heading := SECTIONS.match(line):
                section = heading[1]
            elif line and not line.startswith(" "):
                section = ""
            elif section and (entry := ENTRY.match(line)):
                yield section, entry[1], entry[2]


@cache
def docstrings() -> tuple[Docstring, ...]:
    """Return the docstrings of the package."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    found.append(
                        Docstring(f"{path.relative_to(ROOT.parent)}:{getattr(node, 'lineno', 1)}", text)
                    )
    return tuple(found)


def words(text: str) -> set[str]:
    """Return the words of a text or a name, in the singular, without fillers."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())} - FILLERS


def without_subject(doc: Docstring) -> Iterator[str]:
    """Yield a first line that begins with a clause in place of a subject."""
    if NO_SUBJECT.match(doc.text):
        yield doc.text.splitlines()[0]


def entries_that_begin_badly(doc: Docstring) -> Iterator[str]:
    """Yield entries such as `seed: Of the order`."""
    for _, name, text in doc.entries():
        if NOT_IN_ENTRY.match(text):
            yield f"{name}: {text}"


def entries_that_repeat_their_name(doc: Docstring) -> Iterator[str]:
    """Yield entries such as `manifest: Its manifest`."""
    for section, name, text in doc.entries():
        if section in ("Args", "Attributes") and words(text) <= words(name):
            yield f"{name}: {text}"


def bad_comments(code: str) -> Iterator[str]:
    """Yield comment blocks that begin with a clause in place of a subject, and comments with a private phrase."""
    previous = ""
    for number, line in enumerate(code.splitlines(), 1):
        text, comment = line.strip(), COMMENT.search(line)
        has_no_subject = NOT_IN_COMMENT.match(text) and not previous.startswith("#")
        if has_no_subject or (comment and PRIVATE.search(comment[1])):
            yield f"{number}: {text}"
        previous = text


def private_phrases(doc: Docstring) -> Iterator[str]:
    """Yield phrases that have a plainer or a more usual form."""
    for found in PRIVATE.finditer(doc.text):
        start, end = max(0, found.start() - 30), found.end() + 30
        yield doc.text[start:end].replace("\n", " ")


def chains_of_pronouns(doc: Docstring) -> Iterator[str]:
    """Yield sentences whose nouns have to be guessed."""
    for paragraph in doc.text.split("\n\n"):
        if paragraph.lstrip().startswith(("\b", "\\b")):
            continue  # a table in a command's help
        for sentence in re.split(r"(?<=[.:;])\s", re.sub(r"\s+", " ", paragraph)):
            if len(PRONOUNS.findall(sentence)) >= MOST_PRONOUNS:
                yield sentence


def test_comments_are_plain_english() -> None:
    """No comment begins with `What is ...` or `Of the ...`, or says `nobody`."""
    found = [
        f"{path.relative_to(ROOT.parent)}:{text}"
        for path in sorted(ROOT.rglob("*.py"))
        for text in bad_comments(path.read_text(encoding="utf-8"))
    ]
    assert list(bad_comments('# Else it waits.\nx = "# nobody"  # nobody waits\n# Of\n')) == [
        "1: # Else it waits.",
        '2: x = "# nobody"  # nobody waits',
        "3: # Of",
    ]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


RULES = (
    without_subject,
    entries_that_begin_badly,
    entries_that_repeat_their_name,
    private_phrases,
    chains_of_pronouns,
)


@pytest.mark.parametrize("rule", RULES)
def test_docstrings_are_plain_english(rule: Callable[[Docstring], Iterator[str]]) -> None:
    """Every docstring of the package keeps every rule."""
    found = [f"{doc.place}: {text}" for doc in docstrings() for text in rule(doc)]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (without_subject, "What is left of a snapshot."),
        (entries_that_begin_badly, "Order.\n\nArgs:\n    seed: Of the order."),
        (entries_that_repeat_their_name, "Read.\n\nArgs:\n    manifest: Its manifest."),
        (private_phrases, "The run goes on."),
        (chains_of_pronouns, "That of another one is what those of each have with it."),
    ],
)
def test_each_rule_finds_what_it_is_for(rule: Callable[[Docstring], Iterator[str]], text: str) -> None:
    """A rule that found nothing would hold nothing."""
    assert list(rule(Docstring("here", text)))
