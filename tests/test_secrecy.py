from __future__ import annotations

from typing import Any

import pytest

from elasticflow import secrecy

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
    table = secrecy.without_secrets({"uri": "sftp://me:pass@host/x", "options": OPTIONS, "every": "1 epoch"})
    assert table == {
        "uri": "sftp://me@host/x",
        "every": "1 epoch",
        "options": {
            "key_filename": "/home/me/.ssh/id",
            "anon": False,
            "client_kwargs": {"region_name": "eu"},
        },
    }
    assert secrecy.without_secrets({"uri": None, "options": {}}) == {"uri": None, "options": {}}


def test_messages_hold_no_secret() -> None:
    """Values of secret options are masked wherever they stand in a text; others are left."""
    text = "403 for AKIAEXAMPLE/hunter22 with session, google-id in eu (/home/me/.ssh/id)"
    expected = "403 for ***/*** with ***, *** in eu (/home/me/.ssh/id)"
    assert secrecy.mask(text, "s3://bucket/x", OPTIONS) == expected


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
    assert secrecy.public_overrides([given]) == (() if kept is None else (kept,))
