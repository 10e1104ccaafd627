"""Forms of a moment: a text for a person, an object for a program, and the payload of a webhook."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_never

from elasticflow.observe.terminal.formats import number, plural
from elasticflow.system.records import unix_time

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.notify import Format
    from elasticflow.sinks.notify.moments import Moment
    from elasticflow.sinks.sink import RunFacts

_FORMAT = 1
_LATE = timedelta(minutes=2)
# Most characters. Discord takes 2,000 in all.
_LONGEST, _LONGEST_SENTENCE = 1900, 1500


def text_of(moment: Moment, run: RunFacts, now: datetime | None = None) -> str:
    """Return the message, with a line each for the event, the progress of training, and the next command."""
    sentence = moment.sentence
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = f"{sentence[:_LONGEST_SENTENCE]} ..."
    lines = [f"{run.job} {run.run_id} on {socket.gethostname()} {sentence}"]
    how_far = [plural(moment.step, "step")] if moment.step else []
    if moment.step and moment.steps is not None:
        how_far = [f"step {moment.step} of {moment.steps}"]
    how_far += [f"{name} {number(value)}" for name, value in (moment.measured or {}).items()]
    if moment.name == "first_restart" and moment.restarts_left is not None:
        how_far.append(f"{moment.restarts_left} of {plural(moment.restart_budget or 0, 'restart')} left")
    if how_far:
        lines.append(", ".join(how_far))
    if moment.next is not None:
        lines.append(moment.next)
    at, now = unix_time(moment.at), now or datetime.now(UTC)
    if at is not None and now - (then := datetime.fromtimestamp(at, UTC)) > _LATE:
        lines.append(f"This was at {then:%Y-%m-%d %H:%M} UTC; it could not be sent before.")
    text = "\n".join(lines)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def object_of(moment: Moment, run: RunFacts) -> dict[str, Any]:
    """Return all known facts as JSON: a command's standard input, and the payload of the format json."""
    return {
        "format": _FORMAT,
        "event": moment.name or "test",
        "text": text_of(moment, run),
        "summary": moment.sentence,
        "job": run.job,
        "run_id": run.run_id,
        "host": socket.gethostname(),
        "folder": str(run.folder),
        "time": moment.at,
        "step": moment.step,
        "steps": moment.steps,
        "measured": moment.measured or {},
        "restarts_left": moment.restarts_left,
        "restart_budget": moment.restart_budget,
        "error": moment.error,
        "exit_code": moment.exit_code,
        "next": moment.next,
    }


def payload_of(moment: Moment, run: RunFacts, form: Format) -> dict[str, Any]:
    """Return the payload for a webhook of that kind. It mentions no user or channel."""
    text = text_of(moment, run)
    match form:
        case "slack":
            # <!channel> and <@user> would be mentions.
            return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
        case "discord":
            return {"content": text, "allowed_mentions": {"parse": []}}
        case "teams":
            body = [{"type": "TextBlock", "text": line, "wrap": True} for line in text.splitlines()]
            card = {
                "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
                "type": "AdaptiveCard",
                "version": "1.4",
                "body": body,
            }
            kind = "application/vnd.microsoft.card.adaptive"
            return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
        case "json":
            return object_of(moment, run)
        case _:
            assert_never(form)
