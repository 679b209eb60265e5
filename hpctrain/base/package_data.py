"""Paths of packaged data: inside the installed package (a wheel), else at the repository's root (editable, clone)."""

from __future__ import annotations

from pathlib import Path

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
