"""How to install a package that only some commands need. hpctrain itself is on no package index, so nobody can ask for
its extras by name."""

from __future__ import annotations

import importlib.metadata
import shlex

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pip_install(*names: str) -> str:
    """Return the pip command that installs packages in the versions that hpctrain accepts, by hpctrain's metadata."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("hpctrain") or []]
    except importlib.metadata.PackageNotFoundError:  # run from a clone, without an installation
        requirements = []
    accepted = {canonicalize_name(item.name): str(item.specifier) for item in requirements}
    return f"pip install {shlex.join(name + accepted.get(canonicalize_name(name), '') for name in names)}"
