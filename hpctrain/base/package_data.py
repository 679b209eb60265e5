"""Finds hpctrain's data files and renders text templates. The data files are in the installed package (a wheel), else
at the root of the repository."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpctrain.base.errors import InputError

if TYPE_CHECKING:
    import jinja2

_PACKAGE = Path(__file__).resolve().parent.parent


def package_data_path(folder: str, name: str = "") -> Path:
    """Return the path of a data folder of hpctrain (containers, docs, slurm, topology), or of the file `name` in it.

    Raises:
        InputError: the path does not exist, because the installation is incomplete.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root / folder / name
        if path.exists():
            return path
    raise InputError(f"{folder}/{name}: not found in the installation of hpctrain; install it again")


def render_template(
    path: Path, filters: Mapping[str, Callable[..., str]] = MappingProxyType({}), **values: object
) -> str:
    """Return the text of the Jinja template at `path` with `values` filled in. Templates that it imports lie in the
    same folder. A name without a value raises jinja2's UndefinedError.

    Args:
        filters: functions that the template may apply to a value, by name.
    """
    return _environment(path.parent, tuple(filters.items())).get_template(path.name).render(**values)


@functools.cache
def _environment(folder: Path, filters: tuple[tuple[str, Callable[..., str]], ...]) -> jinja2.Environment:
    """Return the environment of the templates in a folder. It keeps them compiled: a sweep renders one many times."""
    import jinja2  # most users of packaged data render nothing

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(filters)
    return environment
