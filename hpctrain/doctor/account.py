"""Collects the facts of `hpctrain doctor` about an account: the Python environment that a job will start from, and the
home folder with its quota and caches."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import hpctrain
from hpctrain.base.errors import CommandError
from hpctrain.base.process import Runner
from hpctrain.base.requirements import EXTRAS, needed_packages
from hpctrain.doctor.facts import EnvironmentFacts, EnvironmentKind, HomeFacts, Quota, StoredPart, UnfitPackage
from hpctrain.runs.file_system import device_of, file_system_of

QUOTA_TIMEOUT_S = 10.0
"""Most seconds that `quota` may take; it asks every server of a mounted NFS, and one of them may be down."""
_IMAGE_VARIABLES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_SYSTEM = Path("/usr")
"""Below this folder each machine has its own installation of Debian, RHEL, …"""


Which = Callable[[str], str | None]
"""Type of `shutil.which`, for which tests pass a replacement."""


class PythonPaths(Protocol):
    """The attributes of `sys` that tell which environment a Python belongs to."""

    prefix: str
    base_prefix: str


def inspect_environment(environ: Mapping[str, str], python: PythonPaths = sys) -> EnvironmentFacts:
    """Return facts about the Python that runs hpctrain, from which `hpctrain submit` also starts the job."""
    prefix, package = Path(python.prefix), Path(hpctrain.__file__).resolve().parent
    folders = {
        "the environment": prefix,
        "its Python": Path(python.base_prefix).resolve(),
        "hpctrain": package,
    }
    outside = {
        name: path for name, path in folders.items()
        if name == "the environment" or not (path.is_relative_to(prefix.resolve()) or path.is_relative_to(_SYSTEM))
    }  # fmt: skip
    return EnvironmentFacts(
        kind=_kind(prefix, python, environ),
        python=platform.python_version(),
        parts=tuple(StoredPart(name, path, file_system_of(path)) for name, path in outside.items()),
        unfit=tuple(_unfit_packages()),
    )


def _kind(prefix: Path, python: PythonPaths, environ: Mapping[str, str]) -> EnvironmentKind:
    if any(environ.get(name) for name in _IMAGE_VARIABLES):
        return "image"
    if (prefix / "conda-meta").is_dir():
        return "pixi" if ".pixi" in prefix.parts else "conda"
    return "venv" if python.prefix != python.base_prefix else "system"


def _unfit_packages() -> list[UnfitPackage]:
    """Return the packages whose installed version hpctrain does not accept. A package that is missing counts only if
    every run needs it."""
    needed = {requirement.name for requirement in needed_packages()}
    unfit = []
    for requirement in needed_packages(EXTRAS):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        wrong = requirement.name in needed if version is None else not requirement.specifier.contains(version, True)
        if wrong:
            unfit.append(
                UnfitPackage(requirement.name, version, str(requirement.specifier), requirement.name in needed)
            )
    return unfit


def inspect_home(runner: Runner, environ: Mapping[str, str], which: Which) -> HomeFacts:
    """Return how much room the home folder has, and which caches lie in it."""
    home = Path(environ.get("HOME") or Path.home())
    status = os.statvfs(home) if home.is_dir() else None
    return HomeFacts(
        path=home,
        kind=file_system_of(home),
        free_bytes=status.f_bavail * status.f_frsize if status else None,
        free_files=status.f_favail if status and status.f_files else None,
        quota=_quota(runner, device_of(home)) if which("quota") else None,
        caches=tuple(name for name, path in _caches(home, environ).items() if path.is_relative_to(home)),
    )


def _caches(home: Path, environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of caches that grow to gigabytes or thousands of files, by the variable that moves each."""
    general = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    usual = {
        "PIP_CACHE_DIR": general / "pip",
        "HF_HOME": general / "huggingface",
        "TORCH_HOME": general / "torch",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "APPTAINER_CACHEDIR": home / ".apptainer" / "cache",
    }
    return {name: Path(environ.get(name) or path) for name, path in usual.items()}


def _quota(runner: Runner, device: str) -> Quota | None:
    """Return this user's quota on the file system of `device`, such as server:/home; None if the command `quota`
    reports none.
    """
    with contextlib.suppress(CommandError):
        # -w: one line for each file system. -p: grace times in seconds, so that no field is empty. The exit code is 1
        # if a quota is exceeded.
        return parse_quota(runner.run(["quota", "-w", "-p"], timeout_s=QUOTA_TIMEOUT_S).stdout, device)
    return None


def parse_quota(text: str, device: str) -> Quota | None:
    """Return the quota that `quota -w -p` prints for a device; None if it prints none, or no limit.

    A line has nine fields: device, KiB in use with their soft limit, hard limit and grace time, then the same of files.
    A limit of 0 is none. The soft limit is the one that counts: beyond it, writing ends after the grace time.
    """
    for line in text.splitlines():
        fields = line.split()
        numbers = [field.rstrip("*") for field in fields[1:]]
        if len(fields) != 9 or fields[0] != device or not all(number.isdecimal() for number in numbers):
            continue
        kib, soft, hard, _, files, files_soft, files_hard, _ = map(int, numbers)
        limit_kib, limit_files = soft or hard, files_soft or files_hard
        if limit_kib or limit_files:
            return Quota(kib * 1024, limit_kib * 1024 or None, files, limit_files or None)
    return None
