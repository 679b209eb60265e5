"""The lock of an image: the exact versions of all packages that hpctrain needs, as installed on this machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence

from packaging.requirements import Requirement

from hpctrain.base.errors import InputError
from hpctrain.base.process import Runner

HPCTRAIN_DISTRIBUTION = "hpctrain"
DEBIAN_SEED_PACKAGES = (
    "python3-minimal", "bash", "dash", "coreutils", "grep", "sed", "libc-bin", "libstdc++6", "libgcc-s1", "media-types",
)  # fmt: skip
"""Debian packages that a small image consists of, together with their dependencies; libstdc++6 is for torch."""
_OMITTED_DEBIAN_PACKAGES = ("debconf", "dpkg", "perl-base", "tar", "install-info", "login", "mawk", "gcc-12-base")
"""Debian packages that only serve to install others, and are left out of a small image."""


def locked_packages(extras: Sequence[str] = ()) -> list[str]:
    """Return NAME==VERSION of every package that hpctrain needs, sorted, without a build's local version (+cpu).

    Args:
        extras: extras of hpctrain that the image is to have.

    Raises:
        InputError: a package is not installed here.
    """
    versions: dict[str, str] = {}
    waiting = [(HPCTRAIN_DISTRIBUTION, tuple(extras))]
    while waiting:
        name, wanted = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise InputError(f"{name}: not installed here, and hpctrain needs it; install hpctrain again") from None
        if name != HPCTRAIN_DISTRIBUTION:
            versions[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or []:
            requirement = Requirement(text)
            key = _normal(requirement.name)
            if key not in versions and key != HPCTRAIN_DISTRIBUTION and _applies(requirement, wanted):
                waiting.append((key, tuple(requirement.extras)))
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def lock_sha256(lock: Sequence[str]) -> str:
    """Return the hash that identifies a lock."""
    return hashlib.sha256("\n".join(lock).encode()).hexdigest()


def debian_packages(runner: Runner) -> list[str]:
    """Return NAME=VERSION of the Debian packages that Debian's Python on this machine consists of, sorted.

    Raises:
        InputError: this machine does not run Debian, or hpctrain runs in another Python than Debian's.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    wanted = [*DEBIAN_SEED_PACKAGES, f"python{python}-minimal", f"libpython{python}-stdlib"]
    known = _installed(runner)
    if f"python{python}-minimal" not in known:
        raise InputError(
            f"--base cpu-small: takes Debian's own python{python}, which is not installed here (apt-get install "
            "python3); choose another base: cpu, cuda, rocm, localimage:PATH or a Dockerfile"
        )
    needed: set[str] = set()
    waiting = [name for name in wanted if name in known]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [other for other in known[name][1] if other in known and other not in _OMITTED_DEBIAN_PACKAGES]
    return [f"{name}={known[name][0]}" for name in sorted(needed)]


def _installed(runner: Runner) -> dict[str, tuple[str, list[str]]]:
    """Return {package: (version, dependencies)} of the Debian packages that are installed on this machine."""
    fields = r"${Package}\t${Version}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\n"
    done = runner.run(["dpkg-query", "-W", "-f", fields], timeout_s=60)
    known: dict[str, tuple[str, list[str]]] = {}
    for line in done.stdout.splitlines():
        name, version, state, needed = line.split("\t")
        if state == "installed":
            # Of alternatives, "a | b", both count if installed. A version or architecture after a name is dropped.
            known[name] = (version, [word for item in re.split(r"[,|]", needed) if (word := _name(item))])
    return known


def _name(item: str) -> str:
    return re.split(r"[\s:(]", item.strip(), maxsplit=1)[0]


def _applies(requirement: Requirement, extras: Sequence[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
