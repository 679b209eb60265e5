"""Click types of parameters (files, folders, runs, finite numbers), readers of NAME=NUMBER and node sets, and the
option `--set`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from hpctrain.base.errors import InputError
from hpctrain.cli.options.completion import complete_runs, complete_runs_and_sweeps, complete_settings
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.runs.locate import find_run
from hpctrain.runs.sweeps import NamedRuns, find_runs

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class RunType(click.ParamType[Path]):
    """A click type for a run, given as its folder, its name or its job's id; the value is the folder."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the run's folder.

        Raises:
            InputError: there is no such run; the message says where it was looked up.
            UntrustedError: the folder is another user's, or others can write to it.
        """
        return value if isinstance(value, Path) else find_run(value, os.environ, Path.cwd())

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Return what `complete_runs` returns."""
        return complete_runs(ctx, param, incomplete)


RUN = RunType()


class RunsType(click.ParamType[NamedRuns]):
    """A click type for a run or a sweep, given as its folder, its name, or the id of its job or job array."""

    name = "runs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NamedRuns:
        """Return the run, or the runs of the sweep.

        Raises:
            InputError: there is no such run or sweep, and the message says where it was looked up; or none of the
                sweep's runs is left, or its sweep.json cannot be used.
            UntrustedError: a folder is another user's, or others can write to it.
        """
        return value if isinstance(value, NamedRuns) else find_runs(value, os.environ, Path.cwd())

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Return what `complete_runs_and_sweeps` returns."""
        return complete_runs_and_sweeps(ctx, param, incomplete)


RUNS = RunsType()


class FiniteNumber(click.FloatRange):
    """A click type for a finite number in a range; click's FloatRange accepts 'nan'."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number to compute with", param, ctx)
        return number


def numbers_by_name(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Return the numbers by name: ('a=0.5', 'b=2') -> {'a': 0.5, 'b': 2.0}.

    Args:
        option: option that gave the texts, for errors.

    Raises:
        InputError: a text is not of the form NAME=NUMBER, a number is not above 0, or a name is given twice.
    """
    numbers: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not 0 < value < math.inf:
            raise InputError(f"{option}: found {text!r}; write it like name=0.5, with a number above 0")
        if name in numbers:
            raise InputError(f"{option}: found {name} twice; give it once")
        numbers[name] = value
    return numbers


def numbers_by_node(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Return the numbers by node, from texts that name node sets: ('n[1-2]=0.5',) -> {'n1': 0.5, 'n2': 0.5}.

    Args:
        option: option that gave the texts, for errors.

    Raises:
        InputError: as of `numbers_by_name` and `node_names`; or a node is in two sets.
    """
    numbers: dict[str, float] = {}
    for names, value in numbers_by_name(option, texts).items():
        for node in node_names(option, names):
            if node in numbers:
                raise InputError(f"{option}: found {node} twice; give it once")
            numbers[node] = value
    return numbers


def node_names(option: str, text: str) -> list[str]:
    """Return the nodes of a node set: 'n[1-2],a' -> ['a', 'n1', 'n2'].

    Args:
        option: option that gave the text, for errors.

    Raises:
        InputError: `text` is not a node set, or names no node.
    """
    try:
        names = expand_node_set(text)
    except ValueError as error:
        raise InputError(f"{option} {text}: {error}; write it like n[0-2] or a,b") from None
    if not names:
        raise InputError(f"{option}: found no node; write it like n[0-2] or a,b")
    return names


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_settings,
    help="Override a key of the run file.",
)
