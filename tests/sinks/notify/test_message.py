from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from elasticflow.sinks.notify.message import object_of, payload_of, text_of
from elasticflow.sinks.notify.moments import Moment
from elasticflow.sinks.sink import RunFacts

RUN = RunFacts("r1", "toy", Path("/srv/digits/runs/toy/r1"), Path("/srv/digits"))
AT = "2026-11-23T03:00:01.000000Z"
NOW = datetime(2026, 11, 23, 3, 0, 2, tzinfo=UTC)
FAILED = Moment(
    "failed",
    AT,
    "failed after step 7: rank 0: ValueError: <!channel> & <@U1> @everyone",
    "elasticflow why r1",
    step=7,
    steps=20,
    measured={"loss": 0.25, "eval/f1": None},
    restarts_left=0,
    restart_budget=3,
    error="rank 0: ValueError",
    exit_code=3,
)


def test_a_text_has_a_line_each_for_what_happened_how_far_and_what_next() -> None:
    """And one more where it comes late."""
    text = text_of(FAILED, RUN, NOW)
    first, *others = text.splitlines()
    assert first.startswith("toy r1 on ")
    assert first.endswith(FAILED.sentence)
    assert others == ["step 7 of 20, loss 0.2500, eval/f1 -", "elasticflow why r1"]
    late = text_of(FAILED, RUN, NOW.replace(hour=9))
    assert "This was at 2026-11-23 03:00 UTC; it could not be sent before." == late.splitlines()[-1]


def test_a_first_restart_says_what_is_left() -> None:
    """Beside how far training is."""
    text = text_of(replace(FAILED, name="first_restart", restarts_left=2), RUN, NOW)
    assert "step 7 of 20, loss 0.2500, eval/f1 -, 2 of 3 restarts left" in text.splitlines()


def test_a_text_is_never_longer_than_any_service_takes() -> None:
    """The command to type stays."""
    text = text_of(replace(FAILED, sentence="x" * 10_000), RUN, NOW)
    assert len(text) < 2000
    assert "elasticflow why r1" in text
    assert len(text_of(replace(FAILED, measured=dict.fromkeys(map(str, range(999)), 0.5)), RUN, NOW)) < 2000


def test_nobody_is_called_by_what_an_error_says() -> None:
    """Mentions are disarmed in the way of each service."""
    assert "&lt;!channel&gt; &amp; &lt;@U1&gt; @everyone" in payload_of(FAILED, RUN, "slack")["text"]
    assert {"text"} == payload_of(FAILED, RUN, "slack").keys()
    discord = payload_of(FAILED, RUN, "discord")
    assert {"parse": []} == discord["allowed_mentions"]
    assert FAILED.sentence in discord["content"]
    (attachment,) = payload_of(FAILED, RUN, "teams")["attachments"]
    assert "application/vnd.microsoft.card.adaptive" == attachment["contentType"]
    assert "AdaptiveCard" == attachment["content"]["type"]
    assert FAILED.sentence in attachment["content"]["body"][0]["text"]


def test_the_object_holds_everything() -> None:
    """As JSON, in a form that has a number."""
    told = object_of(FAILED, RUN)
    assert told == json.loads(json.dumps(payload_of(FAILED, RUN, "json")))
    expected = {
        "format": 1,
        "event": "failed",
        "summary": FAILED.sentence,
        "job": "toy",
        "run_id": "r1",
        "folder": "/srv/digits/runs/toy/r1",
        "time": AT,
        "step": 7,
        "steps": 20,
        "measured": {"loss": 0.25, "eval/f1": None},
        "restarts_left": 0,
        "restart_budget": 3,
        "error": "rank 0: ValueError",
        "exit_code": 3,
        "next": "elasticflow why r1",
    }
    assert expected.items() <= told.items()
    assert {"text", "host"} == told.keys() - expected.keys()
