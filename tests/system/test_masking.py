"""Secrets whose values are known do not get out of a process: each way out that was tried has a line here."""

from __future__ import annotations

import io
import json
import os
import sys
import urllib.parse

import pytest

from elasticflow.system.masking import SECRET_NAMES, Mask, mask_of, mask_streams

SECRET = 'hunter2/"x y'
WAYS = {
    "as it is": SECRET,
    "in a sentence": f"logged in with {SECRET}, and on",
    "as JSON": json.dumps({"password": SECRET}),
    "as Python shows it": repr({"value": SECRET}),
    "in a URL": f"https://host/?q={urllib.parse.quote(SECRET)}",
    "in a URL, slashes quoted": f"https://host/?q={urllib.parse.quote(SECRET, safe='')}",
    "in a traceback": f"ValueError: bad value: {SECRET!r}",
    "in a command line": f"curl -H 'X-Auth: {SECRET}' host",
    "twice": SECRET + SECRET,
    "around a line end": f"{SECRET}\n{SECRET}",
}


def leaks(text: str) -> bool:
    """Return whether a part of the secret that is long enough to guess it is in *text*."""
    return "hunter2" in text


@pytest.mark.parametrize("text", WAYS.values(), ids=WAYS)
def test_no_way_leads_out(text: str) -> None:
    """Of texts, of bytes, of values of JSON."""
    mask = Mask([SECRET])
    assert leaks(text)
    assert not leaks(mask.text(text))
    assert not leaks(mask.output(text.encode()).decode())
    assert not leaks(json.dumps(mask.value({"a": [{"b": text}], "c": 3})))


def test_what_is_no_secret_stays() -> None:
    """Numbers, other texts, keys; and short values hide no words."""
    mask = mask_of({"A_TOKEN": "abc", "DECLARED": "xyz", SECRET_NAMES: "DECLARED"})
    assert not mask
    value = {"xyz": [1, 2.5, None, True, "abc xyz"]}
    assert value == mask.value(value)


def test_lines_of_a_key_are_masked_one_by_one() -> None:
    """A private key is printed line by line."""
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----\n"
    mask = mask_of({"SIGNING": key}, ["SIGNING"])
    assert "MIIE" not in mask.text(key)
    assert "got ***" == mask.text("got kqhkiG9w0BAQEF")


def test_what_the_environment_calls_a_secret_is_one() -> None:
    """By its name, by the job's word for it; places and switches are none."""
    mask = mask_of(
        {
            "HF_TOKEN": "hf_abcdefgh",
            "PLAIN": "told-by-job",
            SECRET_NAMES: "PLAIN,ABSENT",
            "PASSWORD_FILE": "/run/secrets/password",
            "TOKEN_URL": "https://login.example.org",
            "SLACK_WEBHOOK_URL": "https://example.org/hook",
            "TOKENIZERS_PARALLELISM": "somewhat",
        }
    )
    assert "*** ***" == mask.text("hf_abcdefgh told-by-job")
    assert "at https://login.example.org ***" == mask.text(
        "at https://login.example.org https://example.org/hook"
    )
    assert "/run/secrets/password somewhat" == mask.text("/run/secrets/password somewhat")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("cannot open https://me:pw12@host/x: gone", "cannot open https://me:***@host/x: gone"),
        ("GET https://h/x?sig=abc&n=1 failed & x=y", "GET https://h/x?sig=***&n=1 failed & x=y"),
        ("two: a://u:p1@h, b://v:p2@h.", "two: a://u:***@h, b://v:***@h."),
        ('{"uri": "s3://k:v@b", "x": "a:b@c"}', '{"uri": "s3://k:***@b", "x": "a:b@c"}'),
        ("to https://hooks.slack.com/services/T0/B0/x1: 404", "to https://hooks.slack.com/*** 404"),
        ("'https://discord.com/api/webhooks/1/x-y'", "'https://discord.com/api/webhooks/***'"),
        ("http://chat/hooks/abcdefghijklmnopqrstuvwxyz of", "http://chat/hooks/*** of"),
        ("https://docs.example.org/hooks/index.html", "https://docs.example.org/hooks/index.html"),
        ("https://host:8080/a?n=1 mail me@x.org", "https://host:8080/a?n=1 mail me@x.org"),
    ],
)
def test_passwords_and_tokens_in_urls_are_masked_though_nobody_knows_them(text: str, masked: str) -> None:
    """In the midst of a text, and only there."""
    assert masked == Mask().text(text)


def test_fields_that_are_called_like_secrets_are_masked() -> None:
    """What a job logs as `log.info("login", password=...)`; our own fields are known."""
    record = Mask().record(
        {"event": "login", "password": "anything", "keys": ["a"], "api_key": None, "rank": 0}
    )
    assert record == {"event": "login", "password": "***", "keys": ["a"], "api_key": None, "rank": 0}


def test_streams_of_a_process_are_masked(
    real_processes: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`print`, `sys.stdout.buffer`, standard error: in one piece, at once, and whatever cannot be encoded is shown."""
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(1, "w", closefd=False)))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(2, "w", closefd=False)))
    mask_streams()
    print("a", SECRET, "b")
    sys.stdout.buffer.write(f"raw {SECRET}\n".encode())
    print(f"err {SECRET}", file=sys.stderr)
    print("half", end="")
    out, err = capfd.readouterr()

    assert "a *** b\nraw ***\nhalf" == out
    assert "err ***\n" == err
    assert (sys.stdout.fileno(), sys.stdout.isatty()) == (1, os.isatty(1))


def test_streams_without_secrets_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put between a job and its output that does nothing."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    before = sys.stdout, sys.stderr
    mask_streams()
    assert before == (sys.stdout, sys.stderr)
