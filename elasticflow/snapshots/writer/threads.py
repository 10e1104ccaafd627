"""Threads whose unforeseen errors end the process, so that nothing waits for a thread that is gone."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def thread(body: Callable[..., None], *args: Any) -> threading.Thread:
    """Return a daemon thread, not yet started, that runs *body* by `or_die`."""
    return threading.Thread(target=or_die, args=(body, *args), daemon=True)


def or_die(body: Callable[..., None], *args: Any) -> None:
    """Run *body*; an unforeseen error is printed and ends the whole process."""
    try:
        body(*args)
    except BaseException:  # noqa: BLE001  # printed, then the process ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
