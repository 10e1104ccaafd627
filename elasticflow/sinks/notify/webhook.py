"""Posts a message to a webhook, whose address is a secret that no error shows."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from elasticflow.sinks.sink import SinkError
from elasticflow.system.masking import Mask

if TYPE_CHECKING:
    from email.message import Message

_REFUSED = frozenset({400, 401, 403, 404, 405, 410})
# An immediate retry would change nothing; a person may correct the cause.
_PAUSE_AFTER_REFUSAL_S, _LONGEST_PAUSE_S = 600.0, 3600.0
_LONGEST_ANSWER = 100


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it with a GET, whose answer would say nothing about the message."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""
        return


def post(address: str, payload: dict[str, Any], timeout_s: float) -> None:
    """Post *payload* as JSON; it has arrived when this function returns.

    Raises:
        SinkError: the message was refused, or no answer came in time; the text names only the host of the address.
    """
    mask = _mask_of(address)
    host = urlsplit(address).hostname or "the webhook"
    try:
        request = urllib.request.Request(  # noqa: S310  # the job names it, and it begins with http
            address,
            json.dumps(payload).encode(),
            {"Content-Type": "application/json; charset=utf-8", "User-Agent": "elasticflow"},
        )
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s):
            pass
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error, host, mask) from None
    except TimeoutError:
        raise SinkError(f"{host} has not answered within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise SinkError(f"{host} has not answered within {timeout_s:g} s") from None
        raise SinkError(mask.text(f"{host}: {type(reason).__name__}: {reason}")) from None


def _refusal(error: urllib.error.HTTPError, host: str, mask: Mask) -> SinkError:
    try:
        said = error.read(_LONGEST_ANSWER).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = ""
    said = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    text = f"{host} answers {error.code} {error.reason}" + (f": {said}" if said else "")
    pause_s = _retry_after_s(error.headers)
    if error.code in _REFUSED or 300 <= error.code < 400:
        pause_s = max(pause_s, _PAUSE_AFTER_REFUSAL_S)
    return SinkError(mask.text(text), pause_s)


def _retry_after_s(headers: Message) -> float:
    """Return the seconds that the answer asks to wait, an hour at most; 0 if it names none."""
    value = str(headers.get("Retry-After") or "").strip()
    try:
        asked_s = float(value)
    except ValueError:
        try:
            asked_s = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(0.0, asked_s), _LONGEST_PAUSE_S)


def _mask_of(address: str) -> Mask:
    """Return a mask that hides the address and each part of it but its host."""
    parts = urlsplit(address)
    pieces = {
        address,
        parts.path,
        parts.query,
        *parts.path.split("/"),
        *parts.query.replace("=", "&").split("&"),
    }
    pieces |= {parts.username or "", parts.password or ""}
    return Mask(piece for piece in pieces if piece.strip("/"))
