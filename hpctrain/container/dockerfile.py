"""Reads a Dockerfile, which can be the base of an image: its instructions become parts of an Apptainer definition."""

from __future__ import annotations

import json
import logging
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spython.main.parse.parsers import DockerParser

from hpctrain.base.errors import FieldError, FileError, InputError

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
