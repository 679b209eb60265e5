"""Parameter types: files, folders, and runs by folder, name or job id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpctrain.runs.locate import find_run

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class RunType(click.ParamType[Path]):
    """A click type for a run, given as its folder, its name or its job's id; the value is the folder."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the run's folder; the error for an unknown run lists where it was looked up."""
        return value if isinstance(value, Path) else find_run(value, os.environ, Path.cwd())


RUN = RunType()
