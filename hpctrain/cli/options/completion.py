"""Values that a shell offers where one is typed: names of runs, keys of the run file with their values, presets. Each
function has Click's signature for `shell_complete`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from hpctrain.runs.locate import names_with_prefix

MOST_RUNS = 200
"""Run folders that are looked into for one completion; each costs a few system calls, on a file system that may be
slow."""

_PLAIN = re.compile(r"[\w.+:@-]+", re.ASCII)
"""A name that every shell reads as one word, as it stands."""


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the names of runs and run folders that begin with `incomplete`, the newest run first; for a path, the
    request that the shell completes folders."""
    return _names_or_folders(incomplete)


def _names_or_folders(incomplete: str, sweeps: bool = False) -> list[CompletionItem[str]]:
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return [CompletionItem(incomplete, type="dir")]
    names = names_with_prefix(incomplete, os.environ, Path.cwd(), MOST_RUNS, sweeps)
    return [CompletionItem(name) for name in names if _PLAIN.fullmatch(name)]


def complete_runs_and_sweeps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return what `complete_runs` returns, and the names of sweeps before it."""
    return _names_or_folders(incomplete, sweeps=True)


def complete_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the keys of the run file that begin with `incomplete`, as 'cluster.kind='; after the '=', the values that
    the key allows, as 'cluster.kind=slurm'; [] for a key that allows any value."""
    return setting_items(incomplete)


def setting_items(incomplete: str, sections: Sequence[str] = ()) -> list[CompletionItem[str]]:
    """Return the completions that `complete_settings` describes.

    Args:
        sections: top-level keys within which keys are completed; (): all.
    """
    from hpctrain.records.format.validation_errors import key_paths  # only for a shell that completes
    from hpctrain.records.run.run import Run

    key, equals, begun = incomplete.partition("=")
    if equals:
        values = dict.fromkeys(value for path, field in key_paths(Run) if path == key for value in _values(field, key))
        return [CompletionItem(f"{key}={value}") for value in values if value.startswith(begun)]
    return [
        CompletionItem(f"{path}=", help=(field.description or "").split(". ")[0].replace("\n", " "))
        for path, field in dict(key_paths(Run)).items()
        if path.startswith(key) and (not sections or path.split(".")[0] in sections)
    ]


def complete_presets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the presets of models that begin with `incomplete`."""
    return [CompletionItem(name) for name in _presets() if name.startswith(incomplete)]


def _presets() -> list[str]:
    from hpctrain.records.model.families import PRESETS  # only for a shell that completes

    return list(PRESETS)


def _values(field: Any, key: str) -> Iterator[str]:
    if key == "model.preset":
        yield from _presets()
    yield from _words(field.annotation)


def _words(annotation: Any) -> Iterator[str]:
    """Yield the texts that a type allows, as YAML writes them: those of Literal, and true and false of bool."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _words(argument)
