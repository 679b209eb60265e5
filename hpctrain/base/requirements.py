"""The packages that hpctrain works with, as the metadata of its installation states them.

hpctrain is on no package index, so a message never asks for its extras by name: it names the package that is missing.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("hf", "data", "track")
"""Extras of hpctrain whose packages its commands use."""


def needed_packages(extras: Sequence[str] = ()) -> list[Requirement]:
    """Return the packages that hpctrain requires under this version of Python, and those of the extras; [] if hpctrain
    is not installed, as in a plain clone.
    """
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("hpctrain") or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [
        requirement for requirement in requirements
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments))
    ]  # fmt: skip


def pip_install(*names: str) -> str:
    """Return the pip command that installs packages in the versions that hpctrain works with."""
    accepted = {canonicalize_name(item.name): str(item.specifier) for item in needed_packages(EXTRAS)}
    return f"pip install {shlex.join(name + accepted.get(canonicalize_name(name), '') for name in names)}"
