"""The table of verbs and the commands behind it tell the same."""

from __future__ import annotations

import importlib
import re

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli.main import VERBS, cli


@pytest.fixture(params=list(VERBS))
def verb(request):
    return request.param


def command_of(verb: str) -> click.Command:
    return getattr(importlib.import_module(f"hpctrain.cli.{VERBS[verb][0]}"), f"{verb}_command")


def words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def test_a_verb_is_called_by_its_name(verb):
    result = CliRunner().invoke(cli, [verb, "--help"], prog_name="hpctrain", catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: hpctrain {verb} ")


def test_its_help_says_what_the_table_says(verb):
    told = words(command_of(verb).help or "")
    promised = words(VERBS[verb][1])
    assert len(promised & told) >= len(promised) / 2, promised - told


def test_every_option_says_what_it_does(verb):
    command = command_of(verb)
    commands = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    for each in commands:
        assert each.help, each.name
        silent = [option.name for option in each.params if isinstance(option, click.Option) and not option.help]
        assert silent == [], each.name


def test_help_lists_every_verb():
    result = CliRunner().invoke(cli, ["--help"], catch_exceptions=False)
    listed = re.findall(r"^  ([a-z]+) ", result.stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == list(VERBS)


@pytest.mark.parametrize(("typo", "hint"), [("statsu", "did you mean 'status'?"), ("zzz", "allowed: demo, init")])
def test_a_typo_is_answered_with_what_is_there(typo, hint):
    result = CliRunner().invoke(cli, [typo])
    assert result.exit_code == 2
    assert hint in result.stderr
