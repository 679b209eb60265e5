"""Building an image: under a temporary name beside its place, verified, and only then moved there."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.process import Runner
from hpctrain.container.run.binds import ENVIRONMENT
from hpctrain.container.run.runtime import Host, Runtime
from hpctrain.container.build.labels import INPUTS, labels_of
from hpctrain.container.build.recipe import ImageRecipe, definition, inputs_sha256

COMPRESSION = "-comp zstd -Xcompression-level 1"
"""Options of mksquashfs: 206 MB and 5 s for torch's packages; the default takes 187 s for 191 MB."""
POLL_S = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildPermissions:
    """The permissions of this user that matter for a build."""

    host: Host
    user_namespaces: bool
    """Whether a process may create a user namespace."""


@dataclass(frozen=True)
class BuildResult:
    """An image that exists now."""

    image: Path
    fresh: bool
    """Whether it was built now; otherwise it existed, built from the same inputs."""
    size_bytes: int
    time_s: float


def build_permissions(host: Host, limit: Path = Path("/proc/sys/user/max_user_namespaces")) -> BuildPermissions:
    """Return the permissions of this process."""
    try:
        allowed = int(limit.read_text()) > 0
    except (OSError, ValueError):
        allowed = False
    return BuildPermissions(host, allowed)


def build_options(rights: BuildPermissions, runtime: Runtime, recipe: ImageRecipe, remote: bool) -> list[str]:
    """Return the options of `apptainer build` for this user and recipe.

    Raises:
        InputError: the definition takes files of this machine, which a remote build does not see.
        RefusedError: this user cannot build images here.
    """
    options = ["--mksquashfs-args", COMPRESSION] if runtime.name == "apptainer" else []
    if remote:
        if recipe.base.kind == "cpu-small" or recipe.environment != "install":
            raise InputError("--remote: only for images whose packages are installed by pip: --base cuda, rocm or cpu")
        return ["--remote", *options]
    # Root with all capabilities needs nothing; everybody else is root in a user namespace of their own.
    if not rights.host.is_root or rights.host.needs_user_namespace:
        if not rights.user_namespaces:
            raise RefusedError(
                "images cannot be built here: this system gives users no user namespaces; add --remote (after "
                f"`{runtime.name} remote login`), or build elsewhere and copy the file"
            )
        options.insert(0, "--fakeroot")
    if recipe.environment == "bind":
        options += ["--bind", f"{recipe.packages_folder}:{ENVIRONMENT}:ro"]  # for the test at the end of the definition
    return options


def build(
    recipe: ImageRecipe, image: Path, commit: str, runtime: Runtime, options: list[str], runner: Runner, clock: Clock,
    environ: Mapping[str, str], say: Say, force: bool = False,
) -> BuildResult:  # fmt: skip
    """Build the image unless one with the same inputs exists.

    On any error, and when interrupted, an earlier image is unchanged and nothing else is left.

    Args:
        say: called with each new line of progress.
        force: build in any case.

    Raises:
        HpctrainError: the build failed, or its result is not the requested image.
        StorageError: the image cannot be written there.
    """
    started, inputs = clock.now(), inputs_sha256(recipe)
    if image.exists() and not force and _is_of(image, inputs, runtime, runner):
        return BuildResult(image, False, image.stat().st_size, 0.0)
    with storage_errors(image):
        image.parent.mkdir(parents=True, exist_ok=True)
    temporary = image.with_name(f".{image.name}.{os.getpid()}.tmp.sif")
    env = {name: value for name, value in environ.items() if not name.endswith("TAINER_FAKEROOT")}
    try:
        with tempfile.TemporaryDirectory(prefix="hpctrain-image-") as folder:
            file, log = Path(folder, "image.def"), Path(folder, "build.log")
            file.write_text(definition(recipe, commit))
            # With --force, the labels of a base that hpctrain built too are replaced.
            argv = [runtime.path, "build", "--force", *options, str(temporary), str(file)]
            code = _run(argv, env, log, runner, clock, say)
            said = _lines(log)
        if code != 0 or not temporary.exists():
            raise HpctrainError(f"{image}: {runtime.name} build ended with {code}: {_reason(said)}")
        if not _is_of(temporary, inputs, runtime, runner):
            raise HpctrainError(f"{image}: what {runtime.name} built does not carry the label {INPUTS}; not kept")
        with storage_errors(image):
            temporary.replace(image)
            sync(image.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return BuildResult(image, True, image.stat().st_size, clock.now() - started)


def _is_of(image: Path, inputs: str, runtime: Runtime, runner: Runner) -> bool:
    try:
        return labels_of(runtime, image, runner).get(INPUTS) == inputs
    except HpctrainError:
        return False


def _run(argv: list[str], env: Mapping[str, str], log: Path, runner: Runner, clock: Clock, say: Say) -> int:
    process = runner.start(argv, env=env, log=log)
    told = 0
    try:
        while True:
            code = process.poll()
            lines = _lines(log)
            for line in lines[told:]:
                if not line.startswith("+"):  # the shell's trace of the definition
                    say(line)
            told = len(lines)
            if code is not None:
                return code
            clock.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _lines(log: Path) -> list[str]:
    """Return the complete lines of the log, without colours."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [_COLOURS.sub("", line).strip() for line in text.split("\n")[:-1] if line.strip()]


def _reason(lines: list[str]) -> str:
    """Return the last two lines that say more than the build's position."""
    words = [
        line for line in lines if not line.startswith(("INFO:", "WARNING:", "+", "FATAL:   While performing build"))
    ]
    return " | ".join(words[-2:]) or (lines[-1] if lines else "it said nothing")
