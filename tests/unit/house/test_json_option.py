"""Every command that prints something prints it for programs too, with --json, and the reference says what."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import click

from hpctrain.base.package_data import package_data_path
from hpctrain.cli.main import VERBS

WITHOUT_JSON = {
    "completion": "prints a script for a shell",
    "exec": "replaces itself by a command of the user, whose output is the answer",
    "schema": "prints JSON always",
    "track": "prints nothing: it writes files of other tools",
}
"""Commands without --json, with the reason."""


def commands() -> dict[str, click.Command]:
    """All commands that are no groups, by the words that call them."""
    verbs = {
        verb: getattr(importlib.import_module(f"hpctrain.cli.{module}"), f"{verb}_command")
        for verb, (module, _) in VERBS.items()
    }
    return {name: command for verb, top in verbs.items() for name, command in _within(verb, top)}


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from _within(f"{name} {word}", inner)


def test_every_command_answers_programs() -> None:
    found = commands()
    flags = {
        name: option
        for name, command in found.items()
        for option in command.params
        if isinstance(option, click.Option) and "--json" in option.opts
    }
    assert found.keys() - flags.keys() == WITHOUT_JSON.keys()
    assert [name for name, option in flags.items() if not option.is_flag or option.name != "as_json"] == []


def test_the_reference_says_what_each_command_answers() -> None:
    text = (package_data_path("docs") / "reference" / "json.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.M)
    assert [name for name, _ in rows] == sorted(commands().keys() - WITHOUT_JSON.keys())
    assert all(answer.strip() for _, answer in rows)
