"""The table of messages about a run, by a webhook or a command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import (
    Description,
    DurationText,
    MayRefer,
    Table,
    bad_key,
    editor_hints,
    optional,
    or_reference,
)
from elasticflow.system.redaction import is_secret_address
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

MomentName = Literal["finished", "failed", "interrupted", "first_restart", "budget_low"]
Format = Literal["slack", "discord", "teams", "json"]
URL, COMMAND = "notify.url", "notify.command"
"""What the two ways are called in events, logs and `sinks/`."""
_REFERENCE = re.compile(r"\$\$\{|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}")
_WEB = re.compile(r"https?://[^\s/]+\S*")


def _address(text: str) -> str:
    if "${" not in text and not _WEB.fullmatch(text):
        raise ValueError("must begin with https:// or http://, and hold no blank")
    return text


Address = Annotated[
    str,
    AfterValidator(_address),
    Field(min_length=1, max_length=4000),
    editor_hints(or_reference(r"https?://[^\s/]+\S*"), "${env:SLACK_WEBHOOK_URL}"),
    Description(
        'a URL, like "https://example.org/hook", or better a variable, like "${env:SLACK_WEBHOOK_URL}"'
    ),
]
Argument = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00]*$"), Description("a text")]


class NotifyTable(Table):
    """Messages about the run, by a webhook, a command, or both."""

    url: Annotated[Address | None, MayRefer(is_late=True)] = optional(
        description="A webhook to which each message is posted. A secret comes from the environment, "
        '"${env:SLACK_WEBHOOK_URL}": it is looked up when a message is sent, and no record holds it.',
    )
    format: Format = Field(
        default="slack",
        description="Format of the message; slack: also for Mattermost, Rocket.Chat and Google Chat; json: an object "
        "with everything that is known.",
    )
    command: list[Argument] | None = optional(
        min_length=1,
        description="A program and its arguments, run for each message in the project root, without a shell. It has the JSON "
        "object on its standard input, and $ELASTICFLOW_TEXT and others in its environment.",
        examples=[["sh", "-c", 'notify-send "$ELASTICFLOW_TEXT"']],
    )
    on: list[MomentName] = Field(
        default=["finished", "failed", "first_restart", "budget_low"],
        min_length=1,
        description="Moments of messages. interrupted: the launch ended before training did, after Ctrl-C, SIGTERM "
        "or a preemption; first_restart: training resumes after the run's first failure; budget_low: a "
        "quarter of restarts.budget is left, or one restart, and again when none is left.",
        examples=[["finished", "failed", "interrupted"]],
    )
    timeout: DurationText = Field(
        default="10 s", description="Time limit of one try; a failed try is repeated."
    )

    @model_validator(mode="after")
    def _tells_somebody(self) -> NotifyTable:
        if self.url is None and self.command is None:
            remedy = 'add a line such as: url = "${env:SLACK_WEBHOOK_URL}"'
            raise bad_key("", codes.MISSING, "[notify] needs url or command", remedy)
        if is_secret_address(_REFERENCE.sub("", self.url or "")):
            message = "notify.url holds a secret, by which anybody can post there, and a run keeps a copy of its job file"
            remedy = 'write url = "${env:SLACK_WEBHOOK_URL}", and set that variable where the command runs'
            raise bad_key("url", codes.SECRET_RECORDED, message, remedy)
        return self

    def ways(self) -> dict[str, dict[str, Any]]:
        """Return the options of each way to send messages, by name."""
        common = {"on": list(self.on), "timeout_s": parse_duration(self.timeout)}
        ways: dict[str, dict[str, Any]] = {}
        if self.url is not None:
            ways[URL] = {"url": self.url, "format": self.format, **common}
        if self.command is not None:
            ways[COMMAND] = {"command": list(self.command), **common}
        return ways

    def variables(self) -> frozenset[str]:
        """Return the variables of the environment that hold the URL or parts of it, and are secret."""
        return frozenset(match["name"] for match in _REFERENCE.finditer(self.url or "") if match["name"])


def looked_up(url: str, environment: Mapping[str, str]) -> str:
    """Return *url* with its references to the environment replaced: a secret.

    Raises:
        ValueError: a variable is not set, or the result is no address; the text names the variable, and shows no secret.
    """
    names = []

    def value(reference: re.Match[str]) -> str:
        if reference["name"] is None:
            return "${"
        names.append(reference["name"])
        found = environment.get(reference["name"])
        if not found and reference["default"] is None:
            raise ValueError(f"the variable {reference['name']} is not set")
        return found or str(reference["default"])

    address = _REFERENCE.sub(value, url)
    if not _WEB.fullmatch(address):
        of = f" of {' and '.join(names)}" if names else ""
        raise ValueError(f"the address{of} must begin with https:// or http://, and hold no blank")
    return address
