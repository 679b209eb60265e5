"""What the runs of a sweep set, which keys may be swept, and how the runs are named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import InputError
from hpctrain.records.format.yaml_file import Override, override_paths
from hpctrain.records.run.run import RUN_NAME

Settings = dict[str, str]
"""What a run of a sweep sets: {key of the run file: value as text, as after `--set KEY=`}."""


@dataclass(frozen=True)
class NamedSettings:
    """A run of a sweep before it is checked."""

    name: str
    settings: Settings

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings and the name, as after `--set`."""
        return (*sweep_overrides(self.settings), f"name={self.name}")


def sweep_overrides(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings of a run of a sweep as overrides. An error about one of them names `--sweep` as the option
    that gave it.
    """
    made = [Override(f"{key}={value}") for key, value in settings.items()]
    for item in made:
        item.option = "--sweep"
    return tuple(made)


def settings_text(settings: Settings) -> str:
    """Return the settings of a run as text, as after `--set`: 'optimizer.lr=3e-4 seed=2'."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "without a setting"


def check_swept_keys(axes: Iterable[Sequence[str]], overrides: Sequence[str]) -> None:
    """Check that each key of a sweep may be swept, and is set once.

    Args:
        axes: the keys that each option, or column of a file, sets.
        overrides: what all runs set, as after `--set`.

    Raises:
        InputError: a key is `name` or a key of `cluster`, or two options set the same key.
    """
    given = {".".join(path): "--set" for path in override_paths(tuple(overrides))}
    for keys in axes:
        for key in keys:
            for other in given:
                if other == key or other.startswith(f"{key}.") or key.startswith(f"{other}."):
                    raise InputError(f"--sweep: {key} and {given[other]} {other} set the same key; give one of them")
        given |= dict.fromkeys(keys, "--sweep")
        for key in keys:
            if key == "name":
                raise InputError("--sweep: name: each run is named by what the sweep sets; leave the key out")
            if key.partition(".")[0] == "cluster":
                raise InputError(
                    f"--sweep: {key}: the runs of a sweep are tasks of one job array, which all ask Slurm for the "
                    "same; submit a sweep for each value"
                )


def check_runs_differ(runs: Iterable[Settings]) -> None:
    """Check that no two runs of a sweep set the same keys to the same values.

    Raises:
        InputError: two runs do; the message shows their settings.
    """
    seen: set[tuple[tuple[str, str], ...]] = set()
    for run in runs:
        content = tuple(sorted(run.items()))
        if content in seen:
            raise InputError(f"--sweep: found the run {settings_text(run)} twice; give it once")
        seen.add(content)


def run_names(base: str, runs: Sequence[Settings]) -> list[str]:
    """Return a name for each run of a sweep: the base with the last word of each swept key and its value, as in
    'gpt-lr3e-4-seed2'.

    If such a name would be too long, not unique, or no name of a folder, all runs are numbered: 'gpt-03'.

    Args:
        base: name of the run file.

    Raises:
        InputError: the base is too long for a number behind it.
    """
    keys = list(dict.fromkeys(key for run in runs for key in run))
    last = {key: key.rpartition(".")[2] for key in keys}
    short = last if len(set(last.values())) == len(keys) else {key: key for key in keys}
    names = ["-".join([base, *(f"{short[key]}{value}" for key, value in run.items())]) for run in runs]
    if _usable(names):
        return names
    width = len(str(len(runs) - 1))
    names = [f"{base}-{number:0{width}}" for number in range(len(runs))]
    if not _usable(names):
        raise InputError(f"--sweep: {names[-1]} is too long for a run's name; give the run file a shorter name")
    return names


def _usable(names: Sequence[str]) -> bool:
    return len(set(names)) == len(names) and all(re.fullmatch(RUN_NAME, name) for name in names)
