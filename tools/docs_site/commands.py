"""The reference of the commands: what `--help` of each command prints."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from hpctrain.cli.main import VERBS, cli
from tools.docs_site.markdown import code, escaped, table

COLUMNS = 100
"""Width of a line of usage."""


def command_reference() -> str:
    """Return the list of all commands, and a section for each: usage, what it does, its options."""
    context = _context(cli, "hpctrain", None)
    verbs = table(["command", "what it does"], [[f"[`{verb}`](#{verb})", escaped(VERBS[verb][1])] for verb in VERBS])
    sections = [_section(cli, context), verbs]
    for verb in VERBS:
        sections += _sections(cli.get_command(context, verb), verb, context)
    return "\n\n".join(sections)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command, parent, name, terminal_width=COLUMNS, max_content_width=COLUMNS, show_default=True,
        help_option_names=["-h", "--help"],
    )  # fmt: skip


def _sections(command: click.Command | None, name: str, parent: click.Context) -> Iterator[str]:
    """Yield the section of a command, and those of its sub-commands."""
    assert command is not None
    context = _context(command, name, parent)
    path = context.command_path.removeprefix("hpctrain ")
    yield f"{'#' * (2 + path.count(' '))} hpctrain {path} {{ #{path.replace(' ', '-')} }}"
    yield _section(command, context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _sections(command.get_command(context, below), below, context)


def _section(command: click.Command, context: click.Context) -> str:
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"```text\n{usage}\n```", *_paragraphs(command.help or "")]
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    parts.append(table(["option", "meaning"], [[code(names), escaped(text)] for names, text in records]))
    return "\n\n".join(parts)


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text; those that begin with '\b' keep their lines."""
    for paragraph in cleandoc(text.partition("\f")[0]).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph[2:]}\n```"
        else:
            yield escaped(paragraph)
