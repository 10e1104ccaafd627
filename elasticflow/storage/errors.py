"""Errors of stores: tells the transient ones, and finds the OSError for each.

The classes of the libraries are compared by name, so that no library is imported to look at an error.
"""

from __future__ import annotations

import errno

from elasticflow.errors import StorageError, chain_of

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
# Timeouts, resets, and answers that were cut or garbled: of botocore, aiohttp, requests, azure-core, fsspec, asyncssh.
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
# Base class of aiohttp's errors for an answer that it could not parse. No server sent their `code` of 400.
_UNPARSED = "HttpProcessingError"


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may well succeed a little later."""
    if isinstance(error, _FINAL):
        return False
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUS
    return any(_passes(cause) for cause in chain_of(error))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that *error* came from, if it is 400 to 599."""
    for cause in chain_of(error):
        if _UNPARSED in _names(cause):
            continue
        response = getattr(cause, "response", None)
        # botocore.
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            # azure-core, aiohttp, gcsfs.
            names = ("status_code", "status", "code")
            status = next((value for name in names if (value := getattr(cause, name, None))), None)
        if str(status).isdigit() and 400 <= int(str(status)) < 600:
            return int(str(status))
    return None


def kind_of(error: BaseException) -> type[OSError]:
    """Return the class of OSError that fits *error* best."""
    if isinstance(error, OSError) and type(error) is not OSError and type(error).__module__ == "builtins":
        return type(error)
    status = status_of(error)
    if status in _STATUS_KINDS:
        return _STATUS_KINDS[status]
    for cause in chain_of(error):
        for name in _names(cause):
            if name in _KINDS:
                return _KINDS[name]
    # gcsfs has no status for a 403, only this word.
    if "Forbidden" in str(error):
        return PermissionError
    if any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in chain_of(error)):
        return TimeoutError
    return ConnectionError if status is None and is_transient(error) else OSError


def as_os_error(error: BaseException, text: str) -> OSError:
    """Return *error* as an OSError of the fitting class and number, with *text* as its message."""
    kind, number = kind_of(error), getattr(error, "errno", None)
    return kind(number, text) if kind is OSError and isinstance(number, int) else kind(text)


def in_full(error: BaseException) -> str:
    """Return the messages of *error* and of all errors that it came from."""
    return "\n".join(map(str, chain_of(error)))


def _passes(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    return not _PASSING_NAMES.isdisjoint(_names(error))


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]
