"""Each option means the same in every command that has it."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

import hpctrain
from hpctrain.base.package_data import package_data_path
from hpctrain.cli.main import VERBS

SLURM = {
    "-p": "--partition", "-A": "--account", "-q": "--qos", "-N": "--nodes", "-t": "--time", "-C": "--constraint",
    "-w": "--nodelist", "-x": "--exclude", "-J": "--job-name", "-G": "--gpus",
}  # fmt: skip
"""Slurm's letters and names, as sbatch(1) has them."""
SUBMITTING = {"submit", "resubmit", "probe", "selfcheck"}
OTHER_KINDS = {"--local", "--lab"}
"""Options with a value in some commands only: `--local` is this machine, and has the number of virtual nodes where
there may be several; `--lab` is the lab, and has the spec of one where the command brings it up."""


def commands() -> Iterator[tuple[str, click.Command]]:
    for verb, (module, _) in VERBS.items():
        yield from _within(verb, getattr(importlib.import_module(f"hpctrain.cli.{module}"), f"{verb}_command"))


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _within(f"{name} {inner.name}", inner)


def options() -> Iterator[tuple[str, click.Option]]:
    for name, command in commands():
        yield from ((name, param) for param in command.params if isinstance(param, click.Option))


def kind(option: click.Option) -> str:
    """What follows the option: nothing, a path, a number or a text."""
    number = (click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Path):
        return "path"
    # The values of Slurm's options for nodes and GPUs have more forms than a number: 2-4, a100:8.
    return "number" if isinstance(option.type, number) or option.opts[-1] in NUMBERS else "text"


NUMBERS = {"--nodes", "--gpus", "--gpus-per-node"}


def test_a_letter_has_one_long_name_in_all_commands() -> None:
    names = defaultdict(set)
    for _, option in options():
        letters = [name for name in option.opts if not name.startswith("--")]
        for letter in letters:
            names[letter].add(next(name for name in option.opts if name.startswith("--")))
    assert {letter: found for letter, found in names.items() if len(found) > 1} == {}
    assert {letter: names[letter] for letter in SLURM} == {letter: {name} for letter, name in SLURM.items()}


def test_slurms_long_names_have_slurms_letters_where_a_job_is_submitted() -> None:
    given = defaultdict(dict)
    for name, option in options():
        if not option.hidden:
            given[name].update({long: option for long in option.opts if long.startswith("--")})
    assert {name for name, known in given.items() if "--time" in known} == SUBMITTING
    for name in SUBMITTING:
        shown = {letter: long for letter, long in SLURM.items() if letter in given[name][long].opts}
        assert (shown, "--gpus-per-node" in given[name]) == (SLURM, True), name
        helps = {long: (given[name][long].help, given[name][long].type.name) for long in SLURM.values()}
        assert helps == {long: (given["submit"][long].help, given["submit"][long].type.name) for long in helps}


def test_a_long_name_takes_the_same_kind_of_value_in_all_commands() -> None:
    kinds = defaultdict(lambda: defaultdict(list))
    for name, option in options():
        for long in option.opts:
            kinds[long][kind(option)].append(name)
    mixed = {long: dict(found) for long, found in kinds.items() if len(found) > 1}
    assert {long: found for long, found in mixed.items() if long not in OTHER_KINDS} == {}


def test_topology_and_plan_have_no_letter() -> None:
    for name, option in options():
        if {"--topology", "--plan"} & {*option.opts}:
            assert len(option.opts) == 1, name


def test_no_text_names_a_file_by_the_letters_of_a_job() -> None:
    letter = re.compile(r"(train|plan|simulate|submit) -[tp]`|-[tp]\s+[\w/.-]+\.json|with -[tp]\b")
    files = [*package_data_path("docs").rglob("*.md"), *Path(hpctrain.__file__).parent.rglob("*.py")]
    assert len(files) > 100
    found = {path.name: letter.findall(path.read_text()) for path in files}
    assert not {name: words for name, words in found.items() if words}
