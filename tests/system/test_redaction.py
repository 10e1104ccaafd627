from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.system import redaction

OPTIONS: dict[str, Any] = {
    "key": "AKIAEXAMPLE",
    "secret": "hunter22",
    "account_key": "azure-key",
    "sas_token": "sv=2026",
    "key_filename": "/home/me/.ssh/id",
    "anon": False,
    "client_kwargs": {"region_name": "eu", "aws_session_token": "session"},
    "token": {"client_id": "google-id"},
}


def test_public_options_hold_no_secret() -> None:
    """What is recorded keeps places and switches, and nothing that grants access."""
    table = redaction.without_secrets(
        {"uri": "sftp://me:pass@host/x", "options": OPTIONS, "every": "1 epoch"}
    )
    assert table == {
        "uri": "sftp://me@host/x",
        "every": "1 epoch",
        "options": {
            "key_filename": "/home/me/.ssh/id",
            "anon": False,
            "client_kwargs": {"region_name": "eu"},
        },
    }
    assert redaction.without_secrets({"uri": None, "options": {}}) == {"uri": None, "options": {}}


def test_messages_hold_no_secret() -> None:
    """Values of secret options are masked wherever they stand in a text; others are left."""
    text = "403 for AKIAEXAMPLE/hunter22 with session, google-id in eu (/home/me/.ssh/id)"
    expected = "403 for ***/*** with ***, *** in eu (/home/me/.ssh/id)"
    assert redaction.mask(text, "s3://bucket/x", OPTIONS) == expected


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("train.epochs=3", "train.epochs=3"),
        ("snapshots.options.secret=hunter22", None),
        ("snapshots.options.anon=true", "snapshots.options.anon=true"),
        ('snapshots.options={ secret = "hunter22" }', None),
        ("snapshots.options={ anon = true }", "snapshots.options={ anon = true }"),
        ("snapshots.uri=ftp://me:pass@host/x", "snapshots.uri=ftp://me@host/x"),
        ("model.args.token=5", "model.args.token=5"),
    ],
)
def test_recorded_overrides_hold_no_secret(given: str, kept: str | None) -> None:
    """A `--set` of a secret is not recorded; everything else is, as given."""
    assert redaction.public_overrides([given]) == (() if kept is None else (kept,))


@pytest.mark.parametrize(
    ("url", "shown", "recorded"),
    [
        ("sftp://me:pass@host/x", "sftp://me:***@host/x", "sftp://me@host/x"),
        ("https://h/x?sig=abc&v=1", "https://h/x?sig=***&v=1", "https://h/x?sig=&v=1"),
        ("https://h/x?v=1&X-Amz-Signature=ab", "https://h/x?v=1&X-Amz-Signature=***", "https://h/x?v=1&X-Amz-Signature="),
        ("s3://bucket/x", "s3://bucket/x", "s3://bucket/x"),
    ],
)  # fmt: skip
def test_urls_hold_no_secret(url: str, shown: str, recorded: str) -> None:
    """A password and a signature are neither shown nor recorded."""
    assert redaction.mask_url(url) == shown
    assert redaction.without_secrets({"uri": url, "options": {}})["uri"] == recorded


@pytest.mark.parametrize(
    "text",
    [
        "login as me with sw0rd/fish failed",
        "GET https://me:sw0rd%2Ffish@host/x",
        "signed with QWxhZGRpbg==, header Bearer t0ken",
        "401 for sftp://me:sw0rd%2Ffish@host/x",
    ],
)
def test_secrets_are_found_quoted_and_cut_out(text: str) -> None:
    """A password is masked as written and as meant; the key in a connection string also alone."""
    options = {
        "connection_string": "AccountName=me;AccountKey=QWxhZGRpbg==;BlobEndpoint=http://x",
        "client_kwargs": {"headers": {"Authorization": "Bearer t0ken"}},
    }
    shown = redaction.mask(text, "sftp://me:sw0rd%2Ffish@host/x", options)
    assert [] == [s for s in ("sw0rd", "QWxhZGRpbg", "t0ken") if s in shown]
    assert "***" in shown


@pytest.mark.parametrize(
    ("url", "password", "masked"),
    [
        ("sftp://me:p@ss-1234@host/x", "p@ss-1234", "sftp://me:***@host/x"),
        ("sftp://me@corp.com:pass-1234@host/x", "pass-1234", "sftp://me@corp.com:***@host/x"),
        ("https://host:8080/a@b", None, "https://host:8080/a@b"),
    ],
)
def test_an_at_sign_in_a_user_or_password_is_part_of_it(url: str, password: str | None, masked: str) -> None:
    """A URL's host begins behind the last @ before the path; no part of the password is shown."""
    assert (masked, f"at {masked}") == (redaction.mask_url(url), redaction.mask_urls_in(f"at {url}"))
    assert redaction.without_password(url) == masked.replace(":***", "")
    if password is not None:
        assert urlsplit(url).password == password
        assert redaction.mask(f"refused: {password}", url, {}) == "refused: ***"
        assert "1234" not in mask_secrets(f'uri = "{url}"')
