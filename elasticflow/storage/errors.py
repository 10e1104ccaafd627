"""What a store's failure means: may it pass, and which kind of OSError is it.

The libraries' classes are known by name, so that none of them is imported to look at an error.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FINAL = (
    FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, StorageError,
)  # fmt: skip
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_PASSING_ERRNO = frozenset(
    {
        errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETDOWN,
        errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EAGAIN,
    }
)  # fmt: skip
# Timeouts, resets, cut and garbled answers of botocore, aiohttp, requests, azure-core, fsspec and asyncssh.
_PASSING_NAMES = frozenset(
    {
        "ConnectionError", "HTTPClientError", "ResponseParserError", "IncompleteReadError", "IncompleteRead",
        "FlexibleChecksumError",
        "ClientConnectionError", "ClientPayloadError", "ServerTimeoutError",
        "Timeout", "ChunkedEncodingError", "ProxyError",
        "ServiceRequestError", "ServiceResponseError", "FSTimeoutError",
        "ConnectionLost", "SFTPConnectionLost", "SFTPNoConnection", "ServiceNotAvailable", "ChannelOpenError",
    }
)  # fmt: skip
_KINDS: dict[str, type[OSError]] = {
    "SFTPNoSuchFile": FileNotFoundError, "SFTPNoSuchPath": FileNotFoundError,
    "SFTPPermissionDenied": PermissionError, "SFTPWriteProtect": PermissionError,
    "PermissionDenied": PermissionError,
    "NoCredentialsError": PermissionError, "PartialCredentialsError": PermissionError,
    "ClientAuthenticationError": PermissionError,
}  # fmt: skip
_STATUS_KINDS: dict[int, type[OSError]] = {
    401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError,
}  # fmt: skip
# aiohttp's for an answer it could not parse, as one that was cut: their `code` of 400 is its own, no server's.
_UNPARSED = "HttpProcessingError"
_DEEPEST = 10


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may well succeed a little later."""
    if isinstance(error, _FINAL):
        return False
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUS
    return any(_passes(each) for each in _chain(error))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that *error* tells of, if it is at least 400."""
    for each in _chain(error):
        if _UNPARSED in _names(each):
            continue
        response = getattr(each, "response", None)
        # botocore.
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            # azure-core, aiohttp, gcsfs.
            found = next(
                (s for n in ("status_code", "status", "code") if (s := getattr(each, n, None))), None
            )
        if str(found).isdigit() and 400 <= int(str(found)) < 600:
            return int(str(found))
    return None


def kind_of(error: BaseException) -> type[OSError]:
    """Return the OSError that tells best what *error* is."""
    if isinstance(error, OSError) and type(error) is not OSError and type(error).__module__ == "builtins":
        return type(error)
    status = status_of(error)
    if status in _STATUS_KINDS:
        return _STATUS_KINDS[status]
    for each in _chain(error):
        for name in _names(each):
            if name in _KINDS:
                return _KINDS[name]
    # gcsfs tells a 403 in words only.
    if "Forbidden" in str(error):
        return PermissionError
    if any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in _chain(error)):
        return TimeoutError
    return ConnectionError if status is None and is_transient(error) else OSError


def as_os_error(error: BaseException, text: str) -> OSError:
    """Return the OSError of the fitting kind and number that says *text*."""
    kind, number = kind_of(error), getattr(error, "errno", None)
    return kind(number, text) if kind is OSError and isinstance(number, int) else kind(text)


def in_full(error: BaseException) -> str:
    """Return the words of *error* and of all that it came from."""
    return "\n".join(map(str, _chain(error)))


def _passes(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    return not _PASSING_NAMES.isdisjoint(_names(error))


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error*, then what it says it came from."""
    each: Any = error
    for _ in range(_DEEPEST):
        if each is None:
            return
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
