"""What an image is built from: base, lock and definition."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import jinja2

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.base.package_data import package_data_path
from hpctrain.container.build.dockerfile import Dockerfile, read_dockerfile
from hpctrain.container.build.lock import lock_sha256

Kind = Literal["cuda", "rocm", "cpu", "cpu-small", "localimage", "dockerfile"]
Environment = Literal["install", "copy", "bind"]
"""How hpctrain's packages get into the image: installed by pip, copied from this machine, or bound from it at each
start."""
BASES = "cuda, rocm, cpu, cpu-small, localimage:PATH, or the path of a Dockerfile"


@dataclass(frozen=True)
class Base:
    """The base that an image is built on."""

    kind: Kind
    source: str | None = None
    """Name in a registry, or path of an image; None: the one in the definition."""
    docker: Dockerfile | None = None


def parse_base(text: str, source: str | None = None) -> Base:
    """Return the base that a text on the command line names.

    Args:
        source: image to start from instead of the one in the definition.

    Raises:
        InputError: there is no such base, image or Dockerfile.
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
    """Return how packages get into an image of this base by default."""
    return "bind" if kind == "cpu-small" else "install"


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that determines the content of an image."""

    base: Base
    environment: Environment
    lock: list[str]
    python: str
    """Version of this machine's Python without the patch number, such as 3.11: packages copied from here fit no
    other."""
    packages_folder: str
    """Folder of hpctrain's packages on this machine."""
    debian: list[str]
    """NAME=VERSION of the Debian packages of a small image; empty for other images."""
    cuda: str = "12.8"
    """Version of CUDA in the name of PyTorch's image."""
    index: str | None = None
    """Further package index for pip."""
    version: str = __version__


def inputs_sha256(recipe: ImageRecipe) -> str:
    """Return the hash of everything that the image depends on: an image with this label need not be built again."""
    base = _stamp(recipe.base.source) if recipe.base.kind == "localimage" and recipe.base.source else ""
    files = [_stamp(origin) for origin, _ in recipe.base.docker.files] if recipe.base.docker else []
    text = definition(replace(recipe, version=""), commit="", inputs="")
    return hashlib.sha256("\n".join([text, base, *files]).encode()).hexdigest()


def definition(recipe: ImageRecipe, commit: str, inputs: str | None = None) -> str:
    """Return the text of the definition file.

    Args:
        commit: git commit of the hpctrain that builds the image. It is no input of the image, because each run
            brings its own hpctrain.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(package_data_path("containers")), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    kind = recipe.base.kind
    torch = next((line.partition("==")[2] for line in recipe.lock if line.startswith("torch==")), "")
    values = {name: getattr(recipe, name) for name in asdict(recipe) if name != "base"}
    text: str = environment.get_template(f"{kind}.def.j2").render(
        **values, base=kind, source=recipe.base.source, docker=recipe.base.docker, torch=torch, commit=commit or "none",
        lock_sha256=lock_sha256(recipe.lock), inputs_sha256=inputs_sha256(recipe) if inputs is None else inputs,
    )  # fmt: skip
    return text


def _stamp(path: str) -> str:
    """Return size and modification time of a file, or of all files in a folder, as text. Hashes would take too long."""
    root = Path(path)
    try:
        files = sorted(item for item in root.rglob("*") if item.is_file()) if root.is_dir() else [root]
        status = [(item, item.stat()) for item in files]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; the image needs it") from None
    return "\n".join(f"{item} {stat.st_size} {stat.st_mtime_ns}" for item, stat in status)
