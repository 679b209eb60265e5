"""What the commands of `hpctrain bench` share: their output, and checks of their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

from hpctrain.base.errors import InputError
from hpctrain.cli.views.console import Console

GIVEN = click.core.ParameterSource.COMMANDLINE


def say(what: str) -> None:
    """Print on stderr what is being measured."""
    click.echo(f"measuring {what}", err=True)


def bench_console(as_json: bool, width: int = 120) -> Console:
    """Return the console for the tables of a bench; it prints on stderr if `as_json`, because stdout then holds JSON.

    Args:
        width: columns of the console if stdout is no terminal.
    """
    return Console(stderr=as_json, highlight=False, width=None if sys.stdout.isatty() else width)


def echo_json(record: dict[str, Any], as_json: bool) -> None:
    """Print the record on stdout as JSON if `as_json`; else print nothing."""
    if as_json:
        click.echo(json.dumps(record, indent=1))


def machine_text(record: dict[str, Any], **programs: str) -> str:
    """Return a sentence about the machine on which a record was measured, and the versions of programs there.

    Args:
        programs: key in the record's `versions` = printed name: `torch="PyTorch"` adds 'PyTorch 2.8'.
    """
    machine, versions = record["machine"], record["versions"]
    named = ", ".join(f"{name} {versions[key]}" for key, name in programs.items())
    return f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} when it ended; {named}"


def check_kind(kind: str | None, options: Mapping[str, tuple[str, str | None]]) -> None:
    """Check that no option of another kind of measurement was given.

    Args:
        kind: option, without its dashes, that selects the kind of measurement; None for the default kind.
        options: by parameter name: the option, and the kind that it belongs to.

    Raises:
        InputError: an option of another kind was given.
    """
    context = click.get_current_context()
    for name, (option, needed) in options.items():
        if needed != kind and context.get_parameter_source(name) is GIVEN:
            raise InputError(f"{option}: not with --{kind}" if needed is None else f"{option}: only with --{needed}")


def check_rates(rates: Iterable[str]) -> None:
    """Check that every link rate is valid, such as 100mbit, before a lab is built or a measurement begins.

    Raises:
        click.BadParameter: a rate is wrong.
    """
    from hpctrain.lab.spec import rate_bits_per_s

    for rate in rates:
        try:
            rate_bits_per_s(rate)
        except ValueError as error:
            raise click.BadParameter(f"found {rate!r}; {error}", param_hint="--rate") from None
