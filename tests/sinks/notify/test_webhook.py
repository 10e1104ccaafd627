from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from elasticflow.sinks.notify.webhook import post
from elasticflow.sinks.sink import SinkError
from tests.servers import free_port
from tests.webhook_receiver import SECRET, webhook


def parts_in(text: str) -> list[str]:
    """Return the parts of the secret that stand in *text*."""
    return [part for part in SECRET.split("/") if part in text]


def test_a_message_arrives_as_json() -> None:
    """Texts of any language as they are."""
    with webhook() as hook:
        post(hook.url, {"text": "fertig: 3 µs"}, 30.0)
    assert [{"text": "fertig: 3 µs"}] == hook.bodies


@pytest.mark.parametrize(
    ("status", "pause_s"), [(500, 0.0), (429, 3.0), (404, 600.0), (403, 600.0), (302, 600.0)]
)
def test_a_refusal_names_host_and_answer_and_nothing_of_the_address(status: int, pause_s: float) -> None:
    """Also where the answer repeats the path; a redirect is none that is followed. What would not help is not asked soon."""
    with webhook(status) as hook:
        hook.retry_after = "3"
        with pytest.raises(
            SinkError, match=rf"^127\.0\.0\.1 answers {status} .*Cannot POST \*\*\*$"
        ) as caught:
            post(hook.url, {}, 30.0)
        assert 1 == hook.asked
    assert pause_s == caught.value.pause_s
    assert [] == parts_in(str(caught.value))
    assert caught.value.__cause__ is None


def test_the_pause_that_is_asked_for_may_be_a_date() -> None:
    """As RFC 9110 has it; what is neither asks for nothing. More than an hour is not waited, nor a time without end."""
    with webhook(429, 429, 429) as hook:
        hook.retry_after = "inf"
        with pytest.raises(SinkError) as endless:
            post(hook.url, {}, 30.0)
        hook.retry_after = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
        with pytest.raises(SinkError) as caught:
            post(hook.url, {}, 30.0)
        hook.retry_after = "soon"
        with pytest.raises(SinkError) as vague:
            post(hook.url, {}, 30.0)
    assert 3600.0 == endless.value.pause_s
    assert 3000 < caught.value.pause_s <= 3600
    assert 0.0 == vague.value.pause_s


def test_who_does_not_answer_is_not_waited_for() -> None:
    """The time limit is told."""
    with webhook(0) as hook, pytest.raises(SinkError, match=r"^127\.0\.0\.1 has not answered within 0\.2 s$"):
        post(hook.url, {}, 0.2)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{port}/{secret}", "http://127.0.0.1:{port}/{secret}/with blank"]
)
def test_no_error_shows_the_address(address: str) -> None:
    """Nobody listens there; or it is no address."""
    with pytest.raises(SinkError, match=r"^127\.0\.0\.1: ") as caught:
        post(address.format(port=free_port(), secret=SECRET), {}, 30.0)
    assert [] == parts_in(str(caught.value))
