"""Options that several commands have (floor 5)."""

from __future__ import annotations

import click

overrides_option = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key, e.g. train.epochs=3."
)
