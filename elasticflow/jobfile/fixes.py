"""Job files -> the same with all put right that has one answer (`Diagnostic.fix`); all else in them stays as it is."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.errors import FixError
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.jobfile.text import edits
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

# An answer that leads to one of these was none.
_NO_BETTER = frozenset({codes.UNKNOWN_KEY, codes.WRONG_TYPE, codes.OUT_OF_RANGE, codes.MALFORMED})


class FixedFile(NamedTuple):
    """A job file, as it was named, before and after."""

    path: Path
    before: bytes
    after: bytes

    def diff(self) -> list[str]:
        """Return the lines of a unified diff, secrets masked."""
        old, new = (text.decode("utf-8").splitlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, str(self.path), str(self.path), lineterm="")
        return [mask_secrets(line) for line in lines]

    def write(self) -> None:
        """Put the file in its place, whole, with the permissions it had.

        Raises:
            FixError: it cannot be written, or somebody has changed it meanwhile.
        """
        place = Path(os.path.realpath(self.path))
        try:
            if place.read_bytes() != self.before:
                raise FixError(f"{self.path} was changed meanwhile", "give the command again")
            mode = place.stat().st_mode & 0o7777
            atomic_files.write(place, [self.after], mode)
            if place.stat().st_mode & 0o7777 != mode:
                place.chmod(mode)
        except OSError as error:
            raise FixError(f"cannot write {self.path}: {error.strerror or error}") from error


class Fixed(NamedTuple):
    """What can be put right.

    Attributes:
        files: Those that change.
        total: How many findings are gone.
        texts: What the files named hold then, by real path.
        elsewhere: Files that were not named and hold findings with one answer, and how many.
    """

    files: tuple[FixedFile, ...]
    total: int
    texts: Mapping[str, bytes]
    elsewhere: dict[str, int]


def fix(files: Sequence[Path], check: Callable[[Path, Mapping[str, bytes]], list[Diagnostic]]) -> Fixed:
    """Return what becomes of *files* once all is put right in them that has one answer.

    Every answer is tried: it counts if its finding is gone, and it has not led to another about the same line.

    Args:
        files: What may be changed; what one extends may not, unless it is named, too.
        check: Returns what is wrong with a file, given what to read instead of what files hold, by real path.
    """
    repair = _Repair(files, check)
    for file in files:
        repair.put_right(file)
    changed = [
        FixedFile(path, before, repair.texts[place])
        for place, (path, before) in repair.originals.items()
        if repair.texts[place] != before
    ]
    return Fixed(tuple(changed), repair.total, repair.texts, dict(repair.elsewhere))


class _Repair:
    def __init__(
        self, files: Sequence[Path], check: Callable[[Path, Mapping[str, bytes]], list[Diagnostic]]
    ) -> None:
        self._check = check
        self.texts: dict[str, bytes] = {}
        self.originals: dict[str, tuple[Path, bytes]] = {}
        for file in files:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # which the check says
                data = file.read_bytes()
                data.decode("utf-8")
                self.originals[os.path.realpath(file)] = file, data
                self.texts[os.path.realpath(file)] = data
        self.total = 0
        self.elsewhere: Counter[str] = Counter()

    def put_right(self, file: Path) -> None:
        """Take in the answers to what is wrong with one file."""
        diagnostics = self._check(file, self.texts)
        refused: set[tuple[str, str, str]] = set()
        while (found := self._next(diagnostics, refused)) is not None:
            place = os.path.realpath(found.file)
            texts = {**self.texts, place: edits.in_file(self.texts[place], found.fix)}
            after = self._check(file, texts)
            if _is_better(found, diagnostics, after):
                self.texts, diagnostics = texts, after
                self.total += 1
            else:
                refused.add(_what(found))

    def _next(self, diagnostics: list[Diagnostic], refused: set[tuple[str, str, str]]) -> Diagnostic | None:
        elsewhere: Counter[str] = Counter()
        chosen = None
        for each in diagnostics:
            if not each.fix or _what(each) in refused:
                continue
            if os.path.realpath(each.file) not in self.texts:
                elsewhere[each.file] += 1
            elif chosen is None:
                chosen = each
        if chosen is None:
            self.elsewhere |= elsewhere
        return chosen


def _what(diagnostic: Diagnostic) -> tuple[str, str, str]:
    return diagnostic.file, diagnostic.code, diagnostic.message


def _is_better(found: Diagnostic, before: list[Diagnostic], after: list[Diagnostic]) -> bool:
    """Return whether a finding is gone, and none is there that a wrong answer would lead to."""
    known, left = Counter(map(_what, before)), Counter(map(_what, after))
    if found.code == codes.NOT_TOML:
        # What follows in the file was not known before.
        return all(
            each.code != codes.NOT_TOML or each.file != found.file or (each.line or 0) > (found.line or 0)
            for each in after
        )
    new = [each for each in after if each.severity == "error" and _what(each) not in known]
    return left[_what(found)] < known[_what(found)] and not any(
        each.code in {codes.EXCLUSIVE, codes.NOT_TOML}
        or (each.code in _NO_BETTER and each.file == found.file and each.line == found.line and not each.fix)
        for each in new
    )
