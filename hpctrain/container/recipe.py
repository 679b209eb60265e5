"""What an image is built from: base, definition and lock.

The lock has the exact versions of all packages that hpctrain needs, as installed on this machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.base.package_data import package_data_path, render_template
from hpctrain.base.process import Runner
from hpctrain.container.dockerfile import Dockerfile, read_dockerfile

Kind = Literal["cuda", "rocm", "cpu", "cpu-small", "localimage", "dockerfile"]
Environment = Literal["install", "copy", "bind"]
"""How the packages that hpctrain needs get into the image: installed by pip, copied from this machine, or bound from
this machine at each start."""
BASES = "cuda, rocm, cpu, cpu-small, localimage:PATH, or the path of a Dockerfile"
HPCTRAIN_DISTRIBUTION = "hpctrain"
DEBIAN_SEED_PACKAGES = (
    "python3-minimal", "bash", "dash", "coreutils", "grep", "sed", "libc-bin", "libstdc++6", "libgcc-s1", "media-types",
)  # fmt: skip
"""Debian packages that, with their dependencies, an image of base `cpu-small` consists of; libstdc++6 is for torch."""
_OMITTED_DEBIAN_PACKAGES = ("debconf", "dpkg", "perl-base", "tar", "install-info", "login", "mawk", "gcc-12-base")
"""Debian packages that an image of base `cpu-small` omits, because they only serve to install other packages."""


@dataclass(frozen=True)
class Base:
    """The base that an image is built on: another image, a Dockerfile, or the Debian packages that
    make up Debian's Python as it is installed on this machine."""

    kind: Kind
    source: str | None = None
    """Name in a registry, or path of an image; None: the image that the definition's template names."""
    docker: Dockerfile | None = None
    """The Dockerfile, for the kind dockerfile; None for other kinds."""


def parse_base(text: str, source: str | None = None) -> Base:
    """Return the base that the option --base names.

    Args:
        text: value of --base.
        source: value of --from: image of a registry to start from, only with cuda, rocm and cpu; None: the usual one
            of `text`.

    Raises:
        InputError: there is no such base, image or Dockerfile, or `source` is given for another base.
    """
    for kind in ("cuda", "rocm", "cpu"):
        if text == kind:
            return Base(kind, source)
    if source is not None:
        raise InputError(f"--from: only with --base cuda, rocm or cpu; {text} says itself what it starts from")
    if text == "cpu-small":
        return Base("cpu-small")
    if text.startswith("localimage:"):
        path = Path(text.removeprefix("localimage:")).expanduser().resolve()
        if not path.exists():
            raise InputError(f"--base: {path}: there is no such image")
        return Base("localimage", str(path))
    path = Path(text).expanduser()
    if path.is_file():
        return Base("dockerfile", docker=read_dockerfile(path.resolve()))
    raise InputError(f"--base: found {text!r}; allowed: {BASES}")


def default_environment(kind: Kind) -> Environment:
    """Return how packages get into an image of this kind of base if --environment is not given."""
    return "bind" if kind == "cpu-small" else "install"


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that determines the content of an image."""

    base: Base
    environment: Environment
    lock: list[str]
    """NAME==VERSION of every package that hpctrain needs, as installed on this machine."""
    python: str
    """Version of this machine's Python without the patch number, such as 3.11; packages copied from this machine fit no
    other."""
    packages_folder: str
    """Folder with the packages of this machine's Python (site-packages)."""
    debian: list[str]
    """NAME=VERSION of the Debian packages of an image of base `cpu-small`; [] for other images."""
    cuda: str = "12.8"
    """Version of CUDA in the name of PyTorch's image."""
    index: str | None = None
    """URL of a further package index for pip; None: PyPI alone."""
    version: str = __version__
    """Version of hpctrain."""


def inputs_sha256(recipe: ImageRecipe) -> str:
    """Return the hash of everything that an image's content depends on; files of the base count by their size and
    modification time. An image whose label has the same hash need not be built again.

    Raises:
        InputError: a file of the base cannot be read.
    """
    base = _stamp(recipe.base.source) if recipe.base.kind == "localimage" and recipe.base.source else ""
    files = [_stamp(origin) for origin, _ in recipe.base.docker.files] if recipe.base.docker else []
    text = definition(replace(recipe, version=""), commit="", inputs="")
    return hashlib.sha256("\n".join([text, base, *files]).encode()).hexdigest()


def definition(recipe: ImageRecipe, commit: str, inputs: str | None = None) -> str:
    """Return the text of the Apptainer definition file of an image.

    Args:
        commit: git commit of the hpctrain that builds the image. The commit is no input of the image, because each run
            brings its own hpctrain.
        inputs: hash of the inputs, for a label; None: `inputs_sha256(recipe)`.

    Raises:
        InputError: a file of the base cannot be read, or a template is missing.
    """
    kind = recipe.base.kind
    torch = next((line.partition("==")[2] for line in recipe.lock if line.startswith("torch==")), "")
    values = {name: getattr(recipe, name) for name in asdict(recipe) if name != "base"}
    return render_template(
        package_data_path("containers", f"{kind}.def.j2"), **values, base=kind, source=recipe.base.source,
        docker=recipe.base.docker, torch=torch, commit=commit or "none",
        lock_sha256=lock_sha256(recipe.lock), inputs_sha256=inputs_sha256(recipe) if inputs is None else inputs,
    )  # fmt: skip


def _stamp(path: str) -> str:
    """Return size and modification time of a file, or of all files in a folder, as text. Hashes would take too long.

    Raises:
        InputError: a file cannot be read.
    """
    root = Path(path)
    try:
        files = sorted(item for item in root.rglob("*") if item.is_file()) if root.is_dir() else [root]
        status = [(item, item.stat()) for item in files]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; the image needs it") from None
    return "\n".join(f"{item} {stat.st_size} {stat.st_mtime_ns}" for item, stat in status)


def locked_packages(extras: Sequence[str] = ()) -> list[str]:
    """Return NAME==VERSION of every package that hpctrain needs, sorted, without a build's local version (+cpu).

    Args:
        extras: extras of hpctrain whose packages are included, such as hf.

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
            key = canonicalize_name(requirement.name)
            if key not in versions and key != HPCTRAIN_DISTRIBUTION and _applies(requirement, wanted):
                waiting.append((key, tuple(requirement.extras)))
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def lock_sha256(lock: Sequence[str]) -> str:
    """Return the hash that identifies a lock, the list of NAME==VERSION."""
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
