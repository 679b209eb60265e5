"""Finds packaged data and renders text templates. The data are in the installed package (a wheel), else at the
repository's root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from hpctrain.base.errors import InputError

_PACKAGE = Path(__file__).resolve().parent.parent


def package_data_path(folder: str, name: str = "") -> Path:
    """Return the path of a packaged data folder (containers, slurm, topology) or of a file in it.

    Raises:
        InputError: it does not exist; the installation is incomplete.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root / folder / name
        if path.exists():
            return path
    raise InputError(f"{folder}/{name}: not found in the installation of hpctrain; install it again")


def render_template(
    path: Path, filters: Mapping[str, Callable[..., str]] = MappingProxyType({}), **values: object
) -> str:
    """Return a Jinja template's text with `values` filled in. A name without a value is an error. Templates that it
    imports are in its folder."""
    import jinja2  # most users of packaged data render nothing

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(filters)
    return environment.from_string(path.read_text(encoding="utf-8")).render(**values)
