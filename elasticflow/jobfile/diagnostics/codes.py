"""Every code that a diagnostic can bear; `codes.md` explains each.

Codes are stable: a code that is no longer used is never given another meaning.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

NO_FILE = "EF001"
NOT_UTF8 = "EF002"
NOT_TOML = "EF003"
BAD_SET = "EF004"
EXTENDS = "EF005"
NO_REFERENCE = "EF006"
NO_REFERENCE_HERE = "EF007"
NOT_SET = "EF008"
SECRET_RECORDED = "EF009"  # noqa: S105  # a code, not a secret
UNKNOWN_KEY = "EF101"
MISSING = "EF102"
WRONG_TYPE = "EF103"
OUT_OF_RANGE = "EF104"
MALFORMED = "EF105"
EXCLUSIVE = "EF106"
NOT_PASSABLE = "EF107"
WRONG_KIND = "EF108"
NO_SUCH_PLACE = "EF109"
NO_MODULE = "EF201"
NO_ATTRIBUTE = "EF202"
NOT_CALLABLE = "EF203"
BAD_ARGUMENT = "EF204"
BAD_ARGUMENT_TYPE = "EF205"
NO_LENGTH = "EF206"
NO_FOLDER = "EF207"
UNREADABLE_MODULE = "EF208"
CANNOT_TELL = "EF209"
NOT_A_FUNCTION = "EF210"
NO_STATE = "EF211"
OBJECT_ARGUMENT = "EF213"
FOREIGN_METHOD = "EF214"
NOT_INSTALLED = "EF215"
GROUPS_UNUSED = "EF216"
NO_VALUE = "EF217"
EMPTY_RANGE = "EF301"
BATCH_TOO_SMALL = "EF302"
NO_METRIC = "EF303"
NEEDS_METRIC = "EF305"
NO_STEP = "EF306"
NEEDS_CLOSURE = "EF307"
VIRTUAL_SHARDS = "EF308"
DATA_SHARDS = "EF309"
RENDEZVOUS = "EF310"
AXIS = "EF312"
TOO_MANY_CASES = "EF313"
CASE_NAME = "EF314"
EXCLUSION = "EF315"
CASE_KEY = "EF316"
NO_CASES = "EF317"
AXIS_OVERRIDDEN = "EF318"
SCHEDULE_ENDS = "EF320"
LOSS_TWICE = "EF321"
NO_AVERAGE = "EF322"
SAMPLER = "EF323"
EVALUATION_SETS = "EF324"
STOP_WHEN = "EF325"
SLURM = "EF326"
PARALLEL = "EF327"
NO_ENDPOINT = "EF401"
LOCAL_SNAPSHOTS = "EF402"
SECRET_IN_FILE = "EF403"  # noqa: S105  # a code, not a secret
NOT_SHARED = "EF404"
ONE_NODE_ONLY = "EF405"
NOT_CHECKED = "EF406"
NEVER_DUE = "EF407"
SCHEDULE_LENGTH = "EF408"
SHORT_GRACE = "EF409"
ENDLESS_REFILL = "EF410"
STAGING_MEMORY = "EF411"
EVALUATES_TRAINING = "EF412"
BATCH_OVER_DATA = "EF413"
NO_PROGRAM = "EF414"
UNUSED_OPTIONS = "EF415"
DEEP_IMPORT = "EF501"
DEEP_FACTORY = "EF502"
DEEP_RESULT = "EF503"
DEEP_SAMPLE = "EF504"
DEEP_COLLATE = "EF505"
DEEP_LENGTH = "EF506"
DEEP_STATE = "EF507"
DEEP_STEP = "EF508"
DEEP_HANG = "EF509"
DEEP_DIED = "EF510"
DEEP_UNKNOWN = "EF511"
DEEP_LEFT = "EF512"
DEEP_OVERLAP = "EF513"
DEEP_OTHER_DATA = "EF514"
DEEP_RESTART = "EF515"
OWN_STEP = "EF516"
DEEP_LOSS = "EF518"
DEEP_WEIGHTS = "EF519"
LINT_UNREADABLE = "EF600"
LINT_SET_EPOCH = "EF601"
LINT_REPEATED = "EF602"
LINT_BATCH_PER_RANK = "EF603"
LINT_RESIZE_BREAKS = "EF604"
LINT_SAVED_IN_PLACE = "EF611"
LINT_SAVED_BY_ALL = "EF612"
LINT_SAVED_IN_PART = "EF613"
LINT_NO_RANDOM_STATE = "EF614"
LINT_MAP_LOCATION = "EF615"
LINT_NEVER_LOADED = "EF616"
LINT_LOADED_BY_ARGUMENT = "EF617"
LINT_TRAINER_BEGINS = "EF618"
LINT_FIXED_PORT = "EF621"
LINT_SPAWN = "EF622"
LINT_LOCAL_RANK = "EF623"
LINT_UNDER_RANK = "EF631"
LINT_IN_HANDLER = "EF632"
LINT_NOT_REACHED = "EF633"
LINT_FIND_UNUSED = "EF641"


CODES_PAGE = Path(__file__).with_name("codes.md")
_GROUP = re.compile(r"^## (.+)\n\n\| code \| meaning \|\n\|---\|---\|\n((?:\|.+\n)+)", re.MULTILINE)
_TITLE = re.compile(r"^\| \[(EF\d{3})\]\(#ef\d{3}\) \| (.+) \|$", re.MULTILINE)
_EXAMPLE = re.compile(r"\n\n(Bad|Good):\n\n```\n(.*?)\n```", re.DOTALL)


class Explanation(NamedTuple):
    """A section of the page: the meaning of a code, and lines of a job file with and without the mistake.

    Attributes:
        reason: The reason and the remedy: one paragraph, as one line.
        markdown: Reason and examples as they stand on the page.
    """

    title: str
    reason: str
    bad: str
    good: str
    markdown: str

    @property
    def text(self) -> str:
        """Reason and examples as plain text."""
        return f"{self.reason}\n\nBad:\n{self.bad}\n\nGood:\n{self.good}"


def explanation_of(code: str) -> Explanation | None:
    """Return the page's section about a code; None if the page has no such code."""
    _, heading, rest = _page().partition(f"\n### {code}\n\n")
    if not heading:
        return None
    section = rest.partition("\n\n### ")[0].rstrip("\n")
    title, _, markdown = section.partition("\n\n")
    examples = dict(_EXAMPLE.findall(markdown))
    reason = " ".join(markdown.partition("\n\nBad:")[0].split("\n"))
    return Explanation(title.strip("*"), reason, examples["Bad"], examples["Good"], markdown)


def titles() -> dict[str, str]:
    """Return every code with its title, in the order of the page."""
    return {code: title for group in code_groups().values() for code, title in group.items()}


def code_groups() -> dict[str, dict[str, str]]:
    """Return the headings of the page, each with its codes and their titles."""
    return {heading: dict(_TITLE.findall(rows)) for heading, rows in _GROUP.findall(_page())}


@cache
def _page() -> str:
    return CODES_PAGE.read_text("utf-8")
