"""Builds an image with Apptainer or SingularityCE under a temporary name, checks it, and only then moves it to its
path."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.process import Runner, end_process
from hpctrain.base.system.kernel import kernel_number
from hpctrain.container.entry import ENVIRONMENT, Host, Runtime
from hpctrain.container.recipe import ImageRecipe, definition, inputs_sha256

PREFIX = "org.hpctrain."
INPUTS = f"{PREFIX}inputs"
_TIMEOUT_S = 120.0
COMPRESSION = "-comp zstd -Xcompression-level 1"
"""Options of mksquashfs, which writes the image. For torch's packages they give 206 MB in 5 s; the default options give
191 MB in 187 s."""
POLL_S = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Say = Callable[[str], None]


def labels_of(runtime: Runtime, image: Path, runner: Runner) -> dict[str, str]:
    """Return the labels of an image by name, including those of its base.

    Raises:
        HpctrainError: the runtime cannot read the file as an image.
    """
    done = runner.run([runtime.path, "--silent", "inspect", "--json", str(image)], timeout_s=_TIMEOUT_S)
    try:
        labels = json.loads(done.stdout)["data"]["attributes"]["labels"] or {}
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"{runtime.name} inspect ended with {done.code}"]
        raise HpctrainError(f"{image}: no image that {runtime.name} can read: {lines[-1]}") from None
    return {str(name): str(value) for name, value in labels.items()}


@dataclass(frozen=True)
class Builder:
    """The program that builds images (Apptainer or SingularityCE), and the options and environment with which it
    runs."""

    runtime: Runtime
    options: list[str]
    """Options of the program's `build` command, from `build_options`."""
    environ: Mapping[str, str]
    runner: Runner
    clock: Clock
    say: Say
    """Called with each new line of the program's output."""


@dataclass(frozen=True)
class BuildResult:
    """The image that `build` made or found, its size, and the seconds that the build took (0 for an image that was
    found)."""

    image: Path
    fresh: bool
    """True if `build` built the image; False if an image of equal inputs existed."""
    size_bytes: int
    time_s: float


def has_user_namespaces(limit: Path = Path("/proc/sys/user/max_user_namespaces")) -> bool:
    """Return whether this system lets users create user namespaces.

    Args:
        limit: the kernel's file with the largest allowed number of user namespaces.
    """
    return (kernel_number(limit) or 0) > 0


def build_options(host: Host, user_namespaces: bool, runtime: Runtime, recipe: ImageRecipe, remote: bool) -> list[str]:
    """Return the options of `apptainer build` for this user and recipe.

    Args:
        user_namespaces: whether a process may create a user namespace.
        remote: whether a remote builder builds the image.

    Raises:
        InputError: a remote build of an image that takes files of this machine, which the remote builder does not see.
        RefusedError: this user cannot build images here.
    """
    options = ["--mksquashfs-args", COMPRESSION] if runtime.name == "apptainer" else []
    if remote:
        if recipe.base.kind == "cpu-small" or recipe.environment != "install":
            raise InputError("--remote: only for images whose packages are installed by pip: --base cuda, rocm or cpu")
        return ["--remote", *options]
    # Root with all capabilities needs no option; every other user becomes root in a new user namespace.
    if not host.is_root or host.needs_user_namespace:
        if not user_namespaces:
            raise RefusedError(
                "images cannot be built here: this system gives users no user namespaces; add --remote (after "
                f"`{runtime.name} remote login`), or build elsewhere and copy the file"
            )
        options.insert(0, "--fakeroot")
    if recipe.environment == "bind":
        options += ["--bind", f"{recipe.packages_folder}:{ENVIRONMENT}:ro"]  # for the test at the end of the definition
    return options


def build(recipe: ImageRecipe, image: Path, commit: str, builder: Builder, force: bool = False) -> BuildResult:
    """Build the image of a recipe at the path `image`, unless an image of equal inputs is there.

    After an error or an interruption, an earlier image is unchanged and no other file is left.

    Args:
        commit: git commit of hpctrain, for a label of the image.
        force: build even if an image of equal inputs exists.

    Raises:
        HpctrainError: a file that the image is built from cannot be read, the build failed, or its result is not the
            requested image.
        StorageError: the image cannot be written there.
    """
    started, inputs, runtime = builder.clock.now(), inputs_sha256(recipe), builder.runtime
    if image.exists() and not force and _is_of(image, inputs, builder):
        return BuildResult(image, False, image.stat().st_size, 0.0)
    with storage_errors(image):
        image.parent.mkdir(parents=True, exist_ok=True)
    temporary = image.with_name(f".{image.name}.{os.getpid()}.tmp.sif")
    try:
        with tempfile.TemporaryDirectory(prefix="hpctrain-image-") as folder:
            file, log = Path(folder, "image.def"), Path(folder, "build.log")
            file.write_text(definition(recipe, commit))
            # A base that hpctrain built has labels already; --force replaces them.
            argv = [runtime.path, "build", "--force", *builder.options, str(temporary), str(file)]
            code = _run(argv, log, builder)
            lines = _lines(log)
        if code != 0 or not temporary.exists():
            raise HpctrainError(f"{image}: {runtime.name} build ended with {code}: {_reason(lines)}")
        if not _is_of(temporary, inputs, builder):
            raise HpctrainError(f"{image}: what {runtime.name} built does not carry the label {INPUTS}; not kept")
        with storage_errors(image):
            temporary.replace(image)
            sync(image.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return BuildResult(image, True, image.stat().st_size, builder.clock.now() - started)


def _is_of(image: Path, inputs: str, builder: Builder) -> bool:
    try:
        return labels_of(builder.runtime, image, builder.runner).get(INPUTS) == inputs
    except HpctrainError:
        return False


def _run(argv: list[str], log: Path, builder: Builder) -> int:
    env = {name: value for name, value in builder.environ.items() if not name.endswith("TAINER_FAKEROOT")}
    process = builder.runner.start(argv, env=env, log=log)
    count = 0
    try:
        while True:
            code = process.poll()
            lines = _lines(log)
            for line in lines[count:]:
                if not line.startswith("+"):  # the shell's trace of the definition
                    builder.say(line)
            count = len(lines)
            if code is not None:
                return code
            builder.clock.sleep(POLL_S)
    finally:
        end_process(process)


def _lines(log: Path) -> list[str]:
    """Return the complete lines of a build's log, without colours and empty lines; [] if the log cannot be read."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [_COLOURS.sub("", line).strip() for line in text.split("\n")[:-1] if line.strip()]


def _reason(lines: list[str]) -> str:
    """Return the last two lines of a failed build's log as one text; lines about the progress of the build are
    skipped."""
    words = [
        line for line in lines if not line.startswith(("INFO:", "WARNING:", "+", "FATAL:   While performing build"))
    ]
    return " | ".join(words[-2:]) or (lines[-1] if lines else "it said nothing")
