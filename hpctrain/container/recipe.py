"""What an image is built from: base, definition and lock. A Dockerfile can be the base; its instructions become parts
of the definition.

The lock has the exact versions of all packages that hpctrain needs, as installed on this machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from spython.main.parse.parsers import DockerParser

from hpctrain import __version__
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.package_data import package_data_path, render_template
from hpctrain.base.process import Runner

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
    """Return size and modification time of a file, or of all files in a folder, as text. Hashes would take too long."""
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
        extras: extras of hpctrain whose packages are included, such as report.

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


_NO_MEANING = ("HEALTHCHECK", "EXPOSE", "STOPSIGNAL", "USER", "LABEL", "MAINTAINER", "VOLUME", "ONBUILD", "SHELL")
"""Instructions of a Dockerfile that are dropped. They have no meaning in an Apptainer image, which runs as the user who
starts it and is not monitored."""
_LOCAL = {"docker-archive:": "docker-archive", "localimage:": "localimage", "oci-archive:": "oci-archive"}
"""Apptainer's name (`Bootstrap`) for each kind of base that is a file, by the prefix of the base after FROM."""


@dataclass(frozen=True)
class Dockerfile:
    """The parts of a Dockerfile that go into an Apptainer definition."""

    path: str
    """File name of the Dockerfile."""
    bootstrap: str
    """The definition's `Bootstrap`, which says what the base is: docker (from a registry), or one of `_LOCAL`."""
    source: str
    """The definition's `From`: name of the base in a registry, or path of the base."""
    files: list[tuple[str, str]]
    """Pairs (file beside the Dockerfile, path inside the image)."""
    environment: list[str]
    """Lines NAME=value of the definition's %environment section, quoted for a shell."""
    commands: list[str]
    """Lines of the definition's %post section."""
    run: str
    """Command of the definition's %runscript section; '' if there is none."""
    dropped: list[str]
    """Instructions that were dropped, because they have no meaning in an Apptainer image."""


def read_dockerfile(path: Path) -> Dockerfile:
    """Return the parts of a Dockerfile that has one stage.

    Raises:
        FileError: the Dockerfile cannot be read, has several stages, or has an instruction without an equivalent.
    """
    try:
        lines = _instructions(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise _mistake(path, "", f"cannot read: {error}") from None
    dropped = [line for _, word, line in lines if word in _NO_MEANING]
    rewritten = [_rewritten(path, number, word, line) for number, word, line in lines if word not in _NO_MEANING]
    if sum(line.startswith("FROM ") for line in rewritten) != 1:
        raise _mistake(path, "FROM", "only Dockerfiles with one FROM can be built; build the others first")
    recipe = _parse(path, rewritten)
    source = str(recipe.fromHeader)
    bootstrap, name = next(
        ((kind, source[len(start) :]) for start, kind in _LOCAL.items() if source.startswith(start)), ("docker", source)
    )
    if bootstrap != "docker":
        name = str(path.parent / name)
    return Dockerfile(
        path=path.name, bootstrap=bootstrap, source=name,
        files=[(str((path.parent / str(origin)).resolve()), str(target)) for origin, target in recipe.files],
        environment=list(recipe.environ), commands=_exported(recipe.install, recipe.environ),
        run=_run_line(recipe.entrypoint, recipe.cmd), dropped=dropped,
    )  # fmt: skip


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Return (line number, name of the instruction in capitals, whole instruction in one line) for each instruction in
    the text of a Dockerfile."""
    instructions: list[tuple[int, str, str]] = []
    start, parts = 0, [""]
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or not (line.strip() or parts != [""]):
            continue
        if parts == [""]:
            start, parts = number, []
        body = line.rstrip()
        parts.append(body.removesuffix("\\").strip())
        if not body.endswith("\\"):
            whole = " ".join(filter(None, parts))
            instructions.append((start, whole.split(maxsplit=1)[0].upper(), whole))
            parts = [""]
    return instructions


def _rewritten(path: Path, number: int, word: str, line: str) -> str:
    """Return an instruction of a Dockerfile in a form that spython converts correctly.

    Args:
        path: path of the Dockerfile, for errors.
        number: the instruction's line number, for errors.
        word: the instruction's name in capitals.
        line: the whole instruction.

    Raises:
        FileError: the instruction cannot be built.
    """
    rest = line[len(word) :].strip()
    if not rest:
        raise _mistake(path, word, "has no arguments", number)
    if word in ("RUN", "CMD", "ENTRYPOINT") and rest.startswith("["):
        try:
            return f"{word} {shlex.join(json.loads(rest))}"
        except (ValueError, TypeError):
            raise _mistake(path, word, f"found {rest!r}; write a JSON list, or a command", number) from None
    if word == "ENV" and "=" not in rest.split(maxsplit=1)[0]:
        name, _, value = rest.partition(" ")
        return f'ENV {name}="{value.strip()}"'
    if word in ("COPY", "ADD"):
        options = [item for item in rest.split() if item.startswith("--")]
        if any(item.startswith("--from") for item in options):
            raise _mistake(path, word, "--from: several stages cannot be built; build the others first", number)
        rest = " ".join(item for item in rest.split() if not item.startswith("--"))
        try:
            rest = " ".join(json.loads(rest)) if rest.startswith("[") else rest
        except (ValueError, TypeError):
            raise _mistake(path, word, f"found {rest!r}; write a JSON list, or paths", number) from None
        if len(rest.split()) < 2:
            raise _mistake(path, word, f"found {rest!r}; write at least one source, and a target", number)
        if word == "ADD" and re.match(r"(https?|ftp)://", rest):
            return f"RUN {_download(rest)}"
        return f"{word} {rest}"
    if word not in ("RUN", "CMD", "ENTRYPOINT", "ENV", "ARG", "FROM", "WORKDIR"):
        raise _mistake(path, word, "is no instruction that can be built", number)
    return f"{word} {rest}"


def _download(rest: str) -> str:
    """Return the curl command for an ADD of URLs; if the target is a folder, a file keeps the name in its URL.

    Args:
        rest: the arguments of ADD: URLs and a target.
    """
    *addresses, target = rest.split()
    names = [target + address.rsplit("/", 1)[-1] if target.endswith("/") else target for address in addresses]
    pairs = zip(addresses, names, strict=True)
    return " && ".join(f"curl -fsSL --create-dirs -o {shlex.quote(name)} {shlex.quote(url)}" for url, name in pairs)


def _parse(path: Path, lines: list[str]) -> DockerParser:
    logging.getLogger("spython").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        rewritten = Path(folder, "Dockerfile")
        rewritten.write_text("\n".join(lines) + "\n")
        try:
            recipes = DockerParser(str(rewritten)).recipe
        except Exception as error:  # a parser of other people's files may raise anything
            raise _mistake(path, "", f"spython cannot read it: {error}; write a definition by hand") from None
    recipe = next(iter(recipes.values()))
    if not recipe.fromHeader:
        raise InputError(f"{path}: FROM names nothing")
    return recipe


def _mistake(path: Path, field: str, text: str, line: int | None = None) -> FileError:
    return FileError(path, [FieldError(field, text, line)])


def _exported(commands: list[str], environment: list[str]) -> list[str]:
    """Return the lines of %post with `export` before each assignment of ENV and ARG, so that later commands see the
    values.

    Args:
        commands: lines that spython made of RUN, ENV and ARG.
        environment: NAME=value of each ENV.
    """
    assigned = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
    names = {item.partition("=")[0] for item in environment}
    out = []
    for line in commands:
        plain = bool(assigned.match(line)) and (line.partition("=")[0] in names or len(shlex.split(line)) == 1)
        out.append(f"    export {line}" if plain else f"    {line}")
    return out


def _run_line(entrypoint: str | list[str] | None, command: str | list[str] | None) -> str:
    words = [item if isinstance(item, str) else " ".join(item) for item in (entrypoint, command) if item]
    return f'exec {" ".join(words)} "$@"' if words else ""
