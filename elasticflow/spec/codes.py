"""Every code a diagnostic can bear, with its meaning and a bad and a good example (floor 1).

Codes are stable: one that is no longer used is never given to something else.
"""

from __future__ import annotations

NO_FILE = "EF001"
NOT_UTF8 = "EF002"
NOT_TOML = "EF003"
BAD_SET = "EF004"
EXTENDS = "EF005"
UNKNOWN_KEY = "EF101"
MISSING = "EF102"
WRONG_TYPE = "EF103"
OUT_OF_RANGE = "EF104"
MALFORMED = "EF105"
EXCLUSIVE = "EF106"
NOT_PASSABLE = "EF107"
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
EMPTY_RANGE = "EF301"
BATCH_TOO_SMALL = "EF302"
NO_METRIC = "EF303"
NOT_BUILT = "EF304"
NEEDS_METRIC = "EF305"
NO_STEP = "EF306"
NO_ENDPOINT = "EF401"
LOCAL_SNAPSHOTS = "EF402"
SECRET_IN_FILE = "EF403"  # noqa: S105  # a code, not a secret
