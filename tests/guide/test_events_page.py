"""The page about events lists every event and field that the code knows; run as a program, this makes it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.events import FIELDS, SCHEMA_VERSION
from elasticflow.guide.pages import GUIDE
from elasticflow.sinks.otlp import SEVERITY_NUMBERS, SEVERITY_TEXTS, otel_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elasticflow.events import Event

PAGE = GUIDE / "events.md"
_HEAD = Path(__file__).with_name("events_page.md")
_EVENTS, _FIELDS, _LEVELS, _VERSION = (
    "<!-- events -->",
    "<!-- fields -->",
    "<!-- levels -->",
    "<!-- version -->",
)


def page_text() -> str:
    """Return the page, its tables filled in."""
    text = _HEAD.read_text(encoding="utf-8")
    kept = [event for event in events.EVENTS.values() if event.is_kept]
    of_events = _table(
        ("event", "level", "meaning", "its own fields"),
        ((f"`{e}`", e.level, _sentence(e.meaning), _fields_of(e)) for e in kept),
    )
    of_fields = _table(
        ("field", "type", "meaning", "OpenTelemetry"),
        (
            (f"`{name}`", _type(field.type), field.meaning, f"`{otel_name(name)}`")
            for name, field in FIELDS.items()
        ),
    )
    of_levels = _table(
        ("`level`", "`SeverityNumber`", "`SeverityText`"),
        ((f"`{level}`", str(number), SEVERITY_TEXTS[level]) for level, number in SEVERITY_NUMBERS.items()),
    )
    text = text.replace(_EVENTS, of_events).replace(_FIELDS, of_fields).replace(_LEVELS, of_levels)
    return text.replace(_VERSION, str(SCHEMA_VERSION))


def _fields_of(event: Event) -> str:
    return ", ".join(f"`{f}`" + (" (may lack)" if f in event.optional else "") for f in event.fields)


def _sentence(text: str) -> str:
    return text.replace("|", "\\|")


def _type(name: str) -> str:
    return name.replace("?", " or null")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        for row in rows:
            yield "| " + " | ".join(row) + " |"

    return "\n".join(lines())


def test_the_page_is_up_to_date() -> None:
    """If not: `python -m tests.guide.test_events_page`."""
    text = PAGE.read_text("utf-8")
    assert page_text() == text
    assert [] == [e for e in events.EVENTS.values() if e.is_kept and f"| `{e}` | {e.level} |" not in text]
    assert [] == [name for name in FIELDS if f"| `{name}` |" not in text]
    assert "<!--" not in text


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
