"""What is wrong with a text that is no TOML, and the line that was most likely meant.

Lines are mended by small changes of spelling, tried one after the other and together; the first that TOML accepts is
offered. No change knows a key of the job file.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import TYPE_CHECKING, NamedTuple

import tomli

from elasticflow.jobfile.diagnostics.positions import Edit, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How tomli's message begins, what is said instead of the whole line, and what to do.
_OF_WHOLE_LINES = {
    "Cannot overwrite a value": ("this key is given twice", "keep one of the two: it stands in this table already"),
    "Cannot declare": ("this table is given twice", "put the keys of both under one header"),
    "Cannot mutate immutable namespace": (
        "a table in braces is whole, and nothing can be added to it",
        "write the key inside the braces, or the table under a header",
    ),
}  # fmt: skip
_MOST_CHARACTERS = 2_000_000  # that are parsed for one line
_LONGEST = 200
_TYPOGRAPHY = {ord(c): '"' for c in "\u201c\u201d\u201e\u201f\u00ab\u00bb\uff02"}
_TYPOGRAPHY |= {ord(c): "'" for c in "\u2018\u2019\u201a\u201b\uff07"}
_TYPOGRAPHY |= {ord(c): " " for c in "\u00a0\u2002\u2003\u2009\u200a\u202f\u3000"}
_TYPOGRAPHY |= {ord(c): "" for c in "\u200b\u200c\u200d\u2060\ufeff"}
_TYPOGRAPHY |= {0x2013: "-", 0x2212: "-", 0xFF1D: "=", 0xFF1A: ":", 0xFF0C: ",", 0xFF3B: "[", 0xFF3D: "]"}
_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_NOTHING = ("none", "null", "nil", "~", "undefined")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")
_PAIR = re.compile(r"^(\s*)([\w.\-\"' ]*?[\w\"'])(\s*)=(?!=)(\s*)(.*?)(\s*(?:#.*)?)$")


def explain_syntax_error(
    reason: str, text: str, start: int
) -> tuple[str, Span, str | None, tuple[Edit, ...]]:
    """Return what is wrong with a text that is no TOML, where, what to do, and the edit that does it, if there is one answer.

    Args:
        reason: What tomli says.
        text: The whole text.
        start: Where tomli says it.
    """
    line = text.rfind("\n", 0, start) + 1
    for beginning, (words, remedy) in _OF_WHOLE_LINES.items():
        if reason.startswith(beginning):
            return f"not valid TOML: {words}", Span(line, max(start, line + 1)), remedy, ()
    help_: str | None = None
    words, span = reason[:1].lower() + reason[1:], Span(start, start + 1)
    if reason == r"Illegal character '\n'":
        words, help_ = "the quotes are not closed on this line", "end the text with the quotes it begins with"
    elif words.startswith(("unclosed", "unterminated")):
        begin = _start_of_unclosed(text, start, is_text=words.startswith("unterminated"))
        end = -1 if begin is None else text.find("\n", begin)
        if begin is not None and 0 <= end < start:  # the later line, where it is noticed, may be right
            words, span = f"{words}, which begins here", Span(begin, end)
    fix: tuple[Edit, ...] = ()
    if _has_comma_in_number(text, span.start):
        help_ = "TOML writes 0.5 with a point, and 10000 or 10_000 without a comma"
    elif (meant := mended(text, span.start)) is not None:
        help_, fix = meant.remedy, meant.fix
    elif help_ is None and _has_no_value(text, span.start):
        help_ = "the value is missing"
    return f"not valid TOML: {words}", span, help_, fix


def _has_no_value(text: str, start: int) -> bool:
    """Return whether nothing stands after the equals sign of the line around an offset."""
    line = text[text.rfind("\n", 0, start) + 1 :].split("\n", 1)[0]
    _, equals, value = line.partition("=")
    return bool(equals) and not value.partition("#")[0].strip()


def _has_comma_in_number(text: str, start: int) -> bool:
    """Return whether a comma follows the first digits of a value on the line around an offset.

    It may be a decimal comma or separate thousands: a guess could be wrong by a factor of a thousand.
    """
    line = text[text.rfind("\n", 0, start) + 1 :].split("\n", 1)[0]
    return re.search(r"=\s*[+-]?\d[\d_]*,\d", _QUOTED.sub("", line)) is not None


def _start_of_unclosed(text: str, at: int, *, is_text: bool) -> int | None:
    """Return where the text, or the list or inline table, begins that is still open at an offset; None if no line shows it."""
    mark = r"\"\"\"|'''" if is_text else r"[\[{]"
    pattern = re.compile(rf"^[ \t]*[\w.\-\"']+[ \t]*=[ \t]*(?={mark})", re.MULTILINE)
    return max((match.end() for match in pattern.finditer(text, 0, at)), default=None)


class Mended(NamedTuple):
    """A line that is right.

    Attributes:
        line: The line, or several; empty where it is best left out.
        why: What was wrong, as a sentence of its own without a full stop.
        fix: The edit that puts it there, if it is the line in TOML's spelling; nothing where words were made up.
    """

    line: str
    why: str
    fix: tuple[Edit, ...] = ()

    @property
    def remedy(self) -> str:
        """What to do, secrets masked."""
        from elasticflow.jobfile.diagnostics.excerpt import mask_secrets

        if not self.line.strip():
            return f"{self.why}: leave the key out"
        lines = [mask_secrets(each) for each in self.line.strip().split("\n")]
        return (
            f"write {lines[0]} ({self.why})" if len(lines) == 1 else "\n".join([f"{self.why}: write", *lines])
        )


def mended(text: str, start: int) -> Mended | None:
    """Return the line around an offset as it was most likely meant; None where no small change makes it right."""
    begin = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    line = text[begin:end]
    if not line.strip() or len(line) > _LONGEST or _has_comma_in_number(text, start):
        return None
    budget = _MOST_CHARACTERS
    seen, tried = {line}, [(line, "")]
    for _ in range(3):
        further = []
        for candidate, why in tried:
            for change in _CHANGES:
                for other in change.made(candidate):
                    if other in seen:
                        continue
                    seen.add(other)
                    whole = f"{text[:begin]}{other}{text[end:]}"
                    budget -= len(whole)
                    if budget < 0:
                        return None
                    reason = why or change.why
                    if is_toml_up_to(whole, begin + len(other)):
                        is_certain = candidate == line and change.why in _CERTAIN
                        return Mended(other, reason, (Edit(begin, end, other),) if is_certain else ())
                    further.append((other, reason))
        tried = further
    return None


def is_toml_up_to(text: str, end: int) -> bool:
    """Return whether TOML takes a text at least up to an offset."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        return error.pos > end
    except (ValueError, RecursionError):
        return False
    return True


class _Change(NamedTuple):
    why: str
    made: Callable[[str], Iterator[str]]


def _replaced(pattern: str, replacement: str) -> Callable[[str], Iterator[str]]:
    """Return what yields a line with *pattern* replaced."""
    return lambda line: iter((re.sub(pattern, replacement, line),))


def _outside(line: str, change: Callable[[str], str]) -> str:
    """Return a line with what is not in quotes changed."""
    parts, last = [], 0
    for quoted in _QUOTED.finditer(line):
        parts += [change(line[last : quoted.start()]), quoted[0]]
        last = quoted.end()
    return "".join([*parts, change(line[last:])])


def _typography(line: str) -> Iterator[str]:
    yield line.translate(_TYPOGRAPHY)


def _plain_key(line: str) -> Iterator[str]:
    key, equals, value = line.partition("=")
    plain = unicodedata.normalize("NFKD", key).encode("ascii", "ignore").decode()
    yield f"{plain}{equals}{value}"


def _truth(line: str) -> Iterator[str]:
    pattern = re.compile(rf"(?<![\w.-])({'|'.join(_WORDS)})(?![\w.-])(?!\s*=)", re.IGNORECASE)
    yield _outside(line, lambda part: pattern.sub(lambda word: _WORDS[word[1].lower()], part))


def _nothing(line: str) -> Iterator[str]:
    pair = _PAIR.match(line)
    if pair and pair[5].lower().rstrip(",;") in _NOTHING:
        yield ""


def _equals(line: str) -> Iterator[str]:
    yield re.sub(r"^(\s*[\w.\-]+|\s*\"[^\"]*\")\s*(?::=|==|=>|->|<-|:)\s*(.*)$", r"\1 = \2", line)
    if match := re.match(
        r"^\s*(?:set\s+|export\s+)?-{0,2}([A-Za-z_][\w.\-]*)(?:[ \t]+|=)([^\s=][^=]*)$", line
    ):
        yield f"{match[1].replace('-', '_')} = {match[2]}"


def _closing(line: str) -> Iterator[str]:
    """Yield the line with the quote or bracket that is missing at one end of its value."""
    pair = _PAIR.match(line)
    if pair is None or not pair[5]:
        return
    start, value, comment = line[: pair.start(5)], pair[5], pair[6]
    if value[0] in "\"'" and value.count(value[0]) == 1:
        yield f"{start}{value}{value[0]}{comment}"
    elif value[-1] in "\"'" and value.count(value[-1]) == 1:
        yield f"{start}{value[-1]}{value}{comment}"
    for opened, closed in ("[]", "{}"):
        missing = value.count(opened) - value.count(closed)
        if 0 < missing < 4:
            yield f"{start}{value.rstrip(',')}{' ' * (opened == '{')}{closed * missing}{comment}"
    if value.startswith(('"""', "'''")) and value.count(value[:3]) == 1:
        yield f"{start}{value[:1]}{value[3:]}{value[:1]}{comment}"


def _quotes(line: str) -> Iterator[str]:
    pair = _PAIR.match(line)
    if pair and re.fullmatch(r"(?!lambda\b)[A-Za-z_./~$\\-][^\"'()=]*|\d+(?:\.\d+)?\s*[A-Za-z]+", pair[5]):
        yield f"{line[: pair.start(5)]}{json.dumps(pair[5], ensure_ascii=False)}{pair[6]}"
    elif pair and "," in pair[5] and pair[5][0] not in "\"'[{(":
        yield f"{line[: pair.start(5)]}[{pair[5]}]{pair[6]}"


def _inner_quotes(line: str) -> Iterator[str]:
    """Yield the line with bare words in its list or inline table in quotes."""
    pair = _PAIR.match(line)
    if pair and pair[5][:1] in "[{":
        pattern = re.compile(r"(?<=[,\[=])(\s*)(\d+(?:\.\d+)?\s*[A-Za-z]+)(?=\s*[,\]}])")
        value = _outside(pair[5], lambda part: pattern.sub(r'\1"\2"', part))
        pattern = re.compile(r"(?<![\w\"'])([A-Za-z_./$~][\w./:$~-]*)(?=\s*[,\]}])")
        value = _outside(value, lambda part: pattern.sub(_in_quotes, part))
        yield f"{line[: pair.start(5)]}{value}{pair[6]}"


def _in_quotes(word: re.Match[str]) -> str:
    return word[1] if word[1] in {"true", "false", "inf", "nan"} else json.dumps(word[1])


def _brackets(line: str) -> Iterator[str]:
    """Yield the line with a tuple, set or dict call of Python as TOML has them."""
    pair = _PAIR.match(line)
    if pair is None:
        return
    start, value, comment = line[: pair.start(5)], pair[5], pair[6]
    as_table = re.sub(r"^dict[(](.*)[)]$", r"{ \1 }", value)
    yield f"{start}{as_table}{comment}"
    pattern = re.compile(r"(?:tuple|list|set)?\(([^()]*)\)")
    as_list = _outside(value, lambda part: pattern.sub(lambda inner: "[" + inner[1].rstrip(", ") + "]", part))
    yield f"{start}{as_list}{comment}"


def _commas(line: str) -> Iterator[str]:
    start = line.find("=") + 1
    if "'''" in line or '"""' in line:
        return
    pattern = r"(?<=[\w\"'\]}])(?:[ \t]+|\s*;\s*)(?=[\"'\d\[{-]|[A-Za-z_]\w*\s*=)"
    yield line[:start] + re.sub(pattern, ", ", line[start:])


def _numbers(line: str) -> Iterator[str]:
    def changed(part: str) -> str:
        part = re.sub(r"(?<![\w.])\.(\d)", r"0.\1", part)
        part = re.sub(r"(\d)\.(?=[eE]|\s|,|\]|}|$)", r"\1.0", part)
        part = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[fFLlj](?!\w)", r"\1", part)
        return re.sub(r"(?<![\w.])0([XOB])", lambda number: f"0{number[1].lower()}", part)

    yield _outside(line, changed)


def _header(line: str) -> Iterator[str]:
    stripped = line.strip()
    if match := re.match(r"^[\[<({]*\s*([A-Za-z_][\w.\- ]*?)\s*[\])}>]*\s*[:{;,]?$", stripped):
        yield f"[{match[1].strip().replace(' ', '_')}]"
    if match := re.match(r"^(\[\[?[\w.\-]+\]\]?)[\s:]*([A-Za-z_].*)$", stripped):
        yield f"{match[1]}\n{match[2]}"


def _key_blanks(line: str) -> Iterator[str]:
    pair = _PAIR.match(line)
    if pair and re.fullmatch(r"[\w\-. ]+", pair[2]) and " " in pair[2]:
        yield f"{pair[1]}{re.sub(r' +', '_', pair[2])}{line[pair.end(2) :]}"


def _several(line: str) -> Iterator[str]:
    """Yield the line cut where a further pair begins."""
    yield _outside(line, lambda part: re.sub(r"\s*[,;]\s*(?=[A-Za-z_][\w.]*\s*=)", "\n", part))
    yield _outside(line, lambda part: re.sub(r"(?<=\S)[ \t]+(?=[A-Za-z_][\w.]*\s*=(?!=))", "\n", part))


_CHANGES = (
    _Change("quotes and blanks as a word processor writes them", _typography),
    _Change("keys are written in plain letters", _plain_key),
    _Change("no letter stands before the quotes of a text", _replaced(r"(=\s*)[fFrRbBuU]{1,2}(?=[\"'])", r"\1")),
    _Change("TOML writes true and false in small letters, without quotes", _truth),
    _Change("TOML has no null", _nothing),
    _Change("TOML writes key = value", _equals),
    _Change("nothing stands after a value but a comment", _replaced(r"\s*[,;]+\s*$", "")),
    _Change("a number as TOML writes it", _numbers),
    _Change("lists stand in [ ], inline tables in { }", _brackets),
    _Change("an inline table is { key = value, ... }", _replaced(r"([{,]\s*)([\w-]+|\"[^\"]*\"|'[^']*')\s*:\s*", r"\1\2 = ")),
    _Change("a table's header is its name in brackets, on a line of its own", _header),
    _Change("what is opened is closed on the same line", _closing),
    _Change("each key stands on a line of its own", _several),
    _Change("a comment begins with #", _replaced(r"(^|\s)(//|;|--|/\*|%)(.*)$", r"\1#\3")),
    _Change("a backslash stands for itself in single quotes", _replaced(r"\"([^\"']*\\[^\"']*)\"", r"'\1'")),
    _Change("text needs quotes", _quotes),
    _Change("text needs quotes", _inner_quotes),
    _Change("a comma stands between values", _commas),
    _Change("a key has no blanks", _key_blanks),
)  # fmt: skip
# Changes of spelling alone.
_CERTAIN = frozenset(
    {
        "quotes and blanks as a word processor writes them",
        "no letter stands before the quotes of a text",
        "TOML writes true and false in small letters, without quotes",
        "TOML writes key = value",
        "nothing stands after a value but a comment",
        "a number as TOML writes it",
        "lists stand in [ ], inline tables in { }",
        "an inline table is { key = value, ... }",
        "a comment begins with #",
        "text needs quotes",
    }
)
