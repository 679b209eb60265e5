"""Reads the software of this process's Python environment: installed packages, versions of torch and what it was built
for, the operating system. torch is not imported."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import ValidationError

import hpctrain
from hpctrain.base.errors import FileError
from hpctrain.base.process import Runner
from hpctrain.base.regular_file import read_regular
from hpctrain.records.history.provenance import InstalledPackage, SoftwareVersions
from hpctrain.runs.code_copy import git_state

_METADATA_FOLDER = re.compile(r"^([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$")
_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_NCCL = re.compile(r"^nvidia[-_.]nccl[-_.]cu\d+$")
_SMALL_FILE_BYTES = 2**16


def installed_packages(path: Sequence[str] | None = None) -> list[InstalledPackage]:
    """Return every package that is installed on a search path for modules, by name. Of two installations of a package
    the first one counts, as for an import.

    Names and versions come from the names of the folders of metadata. importlib.metadata reads a file of each package
    instead, which takes ten times as long.

    Args:
        path: folders of modules; None: those of this process (sys.path).
    """
    packages: dict[str, InstalledPackage] = {}
    for folder in dict.fromkeys(sys.path if path is None else path):
        for entry, name, version in _metadata_folders(Path(folder or ".")):
            key = re.sub(r"[-_.]+", "-", name).lower()
            if key not in packages and (package := _package(key, version, entry)) is not None:
                packages[key] = package
    return [packages[key] for key in sorted(packages)]


def _metadata_folders(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, name, version) of each folder of metadata in a folder of modules; nothing if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _METADATA_FOLDER.match(entry.name):
                yield Path(entry.path), match[1], match[2]


def _package(name: str, version: str, metadata: Path) -> InstalledPackage | None:
    """Return a package with its origin; without an origin if the metadata's statement of it breaks the rules of
    `InstalledPackage`; None if the name or the version itself breaks them, as in a folder that another program made.
    """
    for origin in (_origin(metadata), {}):
        with contextlib.suppress(ValidationError):
            return InstalledPackage(name=name, version=version, **origin)
    return None


def _origin(metadata: Path) -> dict[str, Any]:
    """Return the fields of `InstalledPackage` that say where a package came from, by its file direct_url.json (PEP
    610); {} for a package of an index, and if the file cannot be used. Nothing in the file raises an error.

    A local file or folder that no longer exists is left out: nobody could install it again, and conda records the
    temporary folders in which its packages were built.
    """
    try:
        value = json.loads(read_regular(metadata / "direct_url.json", _SMALL_FILE_BYTES))
        url, source = without_credentials(value["url"]), value.get("vcs_info")
        more = {
            "editable": value.get("dir_info", {}).get("editable") is True or None,
            "vcs": None if source is None else source["vcs"],
            "commit": None if source is None else source["commit_id"],
            "subdirectory": value.get("subdirectory"),
            "sha256": value.get("archive_info", {}).get("hashes", {}).get("sha256"),
        }
        parts = urlsplit(url)
        if parts.scheme == "file" and (parts.netloc or not Path(unquote(parts.path)).exists()):
            return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, FileError):
        return {}
    return {"url": url} | {name: item for name, item in more.items() if item is not None}


def without_credentials(url: str) -> str:
    """Return an address without password, query and fragment, which may hold tokens, and without the user name, which
    may be a token too, except for ssh, which needs it. A character that ends an address in a file of requirements, or
    that pip interprets there, is percent-encoded.

    Raises:
        ValueError: the text is no address.
    """
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    host = user.partition(":")[0] + at + host if parts.scheme == "ssh" else host
    return urlunsplit((parts.scheme, quote(host, safe="%:[]@"), quote(parts.path, safe="%/:@+~=,!"), "", ""))


def requirements_text(software: SoftwareVersions, packages: Sequence[InstalledPackage]) -> str:
    """Return a file of requirements that `pip install -r` reads to install these packages again. pip itself is left
    out, as in `pip freeze`."""
    lines = [f"# Python {software.python}: python -m pip install -r requirements.lock"]
    if software.hpctrain_commit is not None:
        lines.append(f"# hpctrain {software.hpctrain} was commit {software.hpctrain_commit}")
    if any("+" in package.version for package in packages):
        lines.append("# A version with + is not on the public index: give pip the --index-url it came from.")
    return "\n".join([*lines, *(item.requirement() for item in packages if item.name != "pip")]) + "\n"


def software_versions(
    packages: Sequence[InstalledPackage], environ: Mapping[str, str], runner: Runner | None = None
) -> SoftwareVersions:
    """Return the versions of this process's software.

    Args:
        packages: the installed packages.
        environ: variables of this process, of which only LOADEDMODULES is read.
        runner: runs git, for the commit of hpctrain; None: git is not asked.
    """
    versions = {package.name: package.version for package in packages}
    build = torch_build() if "torch" in versions else {}
    return SoftwareVersions(
        hpctrain=hpctrain.__version__,
        hpctrain_commit=None if runner is None else _own_commit(runner),
        python=platform.python_version(),
        torch=versions.get("torch"),
        cuda=build.get("cuda"),
        rocm=build.get("hip"),
        nccl=next((version for name, version in versions.items() if _NCCL.match(name)), None),
        os=_os_name(),
        glibc=platform.libc_ver()[1] or None,
        kernel=platform.release() or None,
        modules=[name for name in environ.get("LOADEDMODULES", "").split(":") if name],
    )


def torch_build(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return {"cuda": version} or {"hip": version}: what torch was built for, by the text of its file version.py; {}
    for a build for CPUs, or without torch.

    Args:
        path: folders of modules; None: those of this process (sys.path).
    """
    for folder in sys.path if path is None else path:
        with contextlib.suppress(OSError, FileError):
            text = read_regular(Path(folder or ".") / "torch" / "version.py", _SMALL_FILE_BYTES)
            return dict(_BUILD.findall(text.decode("utf-8", "replace")))
    return {}


def _own_commit(runner: Runner) -> str | None:
    """Return the git commit of the checkout in which this hpctrain lies; None if it lies in none."""
    package = Path(hpctrain.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    state = git_state(package, runner)
    return f"{state['commit']}{'+changes' if state['dirty'] else ''}" if state else None


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
