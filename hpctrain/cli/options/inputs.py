"""Options for the inputs of a run, shared by every command that starts or plans one."""

from __future__ import annotations

import click

set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file."
)
