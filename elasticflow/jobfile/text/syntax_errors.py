"""Texts that are not TOML: the place and the rule that a line breaks, or the other format that the text has."""

from __future__ import annotations

import re
import unicodedata

from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.jobfile.diagnostics.positions import Span

# The beginning of tomli's message, our message about the whole line, and the remedy.
_OF_WHOLE_LINES = {
    "Cannot overwrite a value": ("this key is given twice", "keep one of the two: it stands in this table already"),
    "Cannot declare": ("this table is given twice", "put the keys of both under one header"),
    "Cannot mutate immutable namespace": (
        "a table in braces is whole, and nothing can be added to it",
        "write the key inside the braces, or the table under a header",
    ),
}  # fmt: skip
_CONFLICT = re.compile(r"(<{7}|={7}|>{7}|\|{7})( |$)", re.MULTILINE)
_COMMENT = r"(//|/\*|--|%)"
# The beginning of tomli's message, a pattern of the text at its place, and the rule; the first match counts.
_RULES = tuple(
    (reason, re.compile(there, re.IGNORECASE), rule)
    for reason, there, rule in (
        ("Invalid value", r"(true|false|yes|no|on|off)\b", "TOML writes true and false, in small letters and without quotes"),
        ("Invalid value", r"(none|null|nil|undefined)\b|~", "TOML has no null: leave the key out"),
        ("Invalid value", "[\u2018-\u201f\u00ab\u00bb\uff02\uff07]", "write straight quotes, \" or '"),
        ("Invalid value", r"[frbu]{1,2}[\"']", "no letter stands before the quotes of a text"),
        ("Invalid value", r"\.\d", "a number begins with a digit: 0.5"),
        ("Invalid value", r"dict\(", "an inline table is { key = value, ... }"),
        ("Invalid value", r"\(|(tuple|list|set)\(", "a list stands in brackets: [0.9, 0.99]"),
        ("Invalid value", r"[>=]", "TOML writes key = value"),
        ("Invalid value", r"\s*(#|$)", "the value is missing"),
        ("Expected newline", _COMMENT, "a comment begins with #"),
        ("Expected newline", r"[,;:]\s*(#|$)", "nothing but a comment stands after a value or a header"),
        ("Expected newline", r"\.", "digits stand on both sides of the point: 1.0"),
        ("Expected newline", r"[,;]?\s*[\w.-]+\s*=", "each key, and each header, stands on a line of its own"),
        ("Expected '=' after a key", r"]", "a table's name stands in brackets, as [train]"),
        ("Expected '=' after a key", r":\s*(#|$)", "TOML writes key = value, and a table's name in brackets, as [train]"),
        ("Expected '=' after a key", r":", "TOML writes key = value"),
        ("Expected '=' after a key", r"[\x00-\x7f]", "TOML writes key = value; a key has no blanks"),
        ("Expected ']' at the end of a table", r"", "a table's name stands in brackets, without blanks, as [lr_scheduler]"),
        ("Invalid statement", rf"{_COMMENT}|;", "a comment begins with #"),
        ("Unescaped '\\' in a string", r"", "a backslash stands for itself in single quotes"),
        ("Illegal character '\\n'", r"", "end the text with the quotes it begins with"),
        ("Unclosed", r"\.e|\.\s*[,}\]]", "digits stand on both sides of the point: 1.0"),
        ("Unclosed", r"\s*[*^+/]", "TOML does not calculate: write the number itself"),
        ("Expected newline", r"\s*[*^+/]\s*\d", "TOML does not calculate: write the number itself"),
        ("Unclosed array", r".", "a comma stands between values, and a text needs quotes"),
        ("Unclosed inline table", r".", "a comma stands between the keys of a table in braces"),
    )
)  # fmt: skip
_INIT = (
    "tables have their names in brackets, keys are written key = value: `elasticflow init` writes such a file"
)
_HEADER = re.compile(r"\s*\[[\w.\-\" ]+\]")
_PYTHON = re.compile(r"\s*(from \w[\w.]* import |import \w|def \w+\(|class \w+[(:])")
_YAML = re.compile(r"\s*(-\s+)?[\w.\-\"']+:(\s|$)|\s*-\s|---\s*$")


def explain_syntax_error(reason: str, text: str, start: int) -> tuple[str, Span, str | None]:
    """Return the message for a text that is not TOML, its place, and the help.

    Args:
        start: Offset that tomli reports.
    """
    begin = text.rfind("\n", 0, start) + 1
    line, before = text[begin:].split("\n", 1)[0], text[begin:start]
    if _CONFLICT.match(line):
        remedy = "keep the lines of one side; take out those that begin with <<<<<<<, ======= and >>>>>>>"
        return "a merge conflict was not settled", Span(begin, begin + len(line)), remedy
    for prefix, (words, remedy) in _OF_WHOLE_LINES.items():
        if reason.startswith(prefix):
            return f"not valid TOML: {words}", Span(begin, max(start, begin + 1)), remedy
    words = reason[:1].lower() + reason[1:]
    if reason == r"Illegal character '\n'":
        words = "the quotes are not closed on this line"
    span = Span(start, start + 1)
    if reason.startswith(("Unclosed", "Unterminated", 'Expected \'"""\'', 'Expected "')):
        opened = _opening(text, start, is_text=not reason.startswith("Unclosed"))
        end = -1 if opened is None else text.find("\n", opened)
        # The later line, at which the parser notices the mistake, may be right.
        if opened is not None and 0 <= end < start:
            what = f"the {'list' if text[opened] == '[' else 'table' if text[opened] == '{' else 'text'}"
            remedy = f"end {what} with {_CLOSING.get(text[opened], text[opened : opened + 3])}"
            return f"not valid TOML: {words}, which begins here", Span(opened, end), remedy
    return f"not valid TOML: {words}", span, _rule(reason, line, before)


_CLOSING = {"[": "]", "{": "}"}


def _opening(text: str, at: int, *, is_text: bool) -> int | None:
    """Return the beginning of the text, list or inline table that is still open at an offset; None if no line shows it."""
    mark = r"\"\"\"|'''" if is_text else r"[\[{]"
    pattern = re.compile(rf"^[ \t]*[\w.\-\"']+[ \t]*=[ \t]*(?={mark})", re.MULTILINE)
    return max((match.end() for match in pattern.finditer(text, 0, at)), default=None)


def _named(letter: str) -> str:
    return unicodedata.name(letter, f"U+{ord(letter):04X}")


def _rule(reason: str, line: str, before: str) -> str | None:
    """Return the rule that a line breaks after *before*, its correct part; None if unknown."""
    rest = line[len(before) :]
    # A decimal comma, or a comma between thousands: a guess could be wrong by a factor of a thousand.
    if re.search(r"=\s*[+-]?\d[\d_]*,\d", re.sub(r"\"[^\"]*\"|'[^']*'", "", line)):
        return "TOML writes 0.5 with a point, and 10000 or 10_000 without a comma"
    bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
    foreign = next((letter for letter in bare if not letter.isascii()), None)
    if foreign is not None and reason.startswith(("Unclosed", "Expected ']'")):
        return f"{_named(foreign)} cannot stand here: outside quotes TOML knows the letters a to z, digits, _ and -"
    for prefix, there, rule in _RULES:
        if reason.startswith(prefix) and there.match(rest):
            return rule
    if rest[:1] and not rest[0].isascii():
        return f"{_named(rest[0])} cannot stand here: outside quotes TOML knows the letters a to z, digits, _ and -"
    is_word = re.match(r"[A-Za-z_./$]", rest) and (reason == "Invalid value" or before.endswith(" "))
    if not is_word:
        return None
    if "=" not in before:
        return "a text needs quotes, and a list ends with ]"
    pair = re.fullmatch(r"\s*([\w.-]+) *= *([^\"'=,()\[\]{}#]*?)\s*(#.*)?", line)
    if pair is None:
        return "a text needs quotes"
    quote = "'" if "\\" in pair[2] else '"'
    return f"a text needs quotes: {mask_secrets(f'{pair[1]} = {quote}{pair[2]}{quote}')}"


def other_format(text: str) -> tuple[str, str] | None:
    """Return message and help for a text of another format; None for a text that seems to be TOML."""
    if text.lstrip().startswith("{"):
        return "this is JSON, and a job file is TOML", _INIT
    lines = [each for each in text.split("\n") if each.strip() and not each.lstrip().startswith("#")]
    if any(map(_HEADER.match, lines)):
        return None
    if sum(1 for each in lines if _PYTHON.match(each)) > 1:
        remedy = "name the job file that trains with it: `elasticflow init FILE.py` writes one"
        return "this is Python, and a job file is TOML", remedy
    if text.startswith("#!"):
        remedy = "a job file says what is trained: `elasticflow init` writes one; `elasticflow submit slurm JOB` the script of Slurm"
        return "this is a script, and a job file is TOML", remedy
    if 2 * sum(1 for each in lines if _YAML.match(each)) > len(lines):
        return "this is YAML, and a job file is TOML", _INIT
    return None
