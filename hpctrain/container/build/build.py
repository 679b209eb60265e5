"""Building an image: beside its place and under another name, looked at, and only then put there."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, sync_folder
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.process import Runner
from hpctrain.container.run.binds import ENVIRONMENT
from hpctrain.container.run.runtime import Host, Runtime
from hpctrain.container.build.labels import INPUTS, labels_of
from hpctrain.container.build.recipe import ImageRecipe, definition, inputs_sha256

COMPRESSION = "-comp zstd -Xcompression-level 1"
"""Of mksquashfs: 206 MB and 5 s for torch's packages, where its own choice takes 187 s for 191 MB."""
POLL_S = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildPermissions:
    """What this user may do here that a build needs."""

    host: Host
    user_namespaces: bool
    """A process may make itself a user namespace."""


@dataclass(frozen=True)
class BuildResult:
    """An image that is there."""

    image: Path
    fresh: bool
    """Built now; otherwise it was there, of the same inputs."""
    size_bytes: int
    time_s: float


def build_permissions(host: Host, limit: Path = Path("/proc/sys/user/max_user_namespaces")) -> BuildPermissions:
    """The rights of this process."""
    try:
        allowed = int(limit.read_text()) > 0
    except (OSError, ValueError):
        allowed = False
    return BuildPermissions(host, allowed)


def build_options(rights: BuildPermissions, runtime: Runtime, recipe: ImageRecipe, remote: bool) -> list[str]:
    """Options of `apptainer build` for who builds, and what.

    Raises:
        InputError: the definition takes files of this machine, which a remote build does not see.
        RefusedError: this user may build here in no way.
    """
    options = ["--mksquashfs-args", COMPRESSION] if runtime.name == "apptainer" else []
    if remote:
        if recipe.base.kind == "cpu-small" or recipe.environment != "install":
            raise InputError("--remote: only for images whose packages are installed by pip: --base cuda, rocm or cpu")
        return ["--remote", *options]
    # Root with all rights needs nothing; root without them, and everybody else, is root in a namespace of their own.
    if not rights.host.is_root or rights.host.needs_user_namespace:
        if not rights.user_namespaces:
            raise RefusedError(
                "images cannot be built here: this system gives users no user namespaces; add --remote (after "
                f"`{runtime.name} remote login`), or build elsewhere and copy the file"
            )
        options.insert(0, "--fakeroot")
    if recipe.environment == "bind":
        options += ["--bind", f"{recipe.packages_folder}:{ENVIRONMENT}:ro"]  # for the test at its end
    return options


def build(
    recipe: ImageRecipe, image: Path, commit: str, runtime: Runtime, options: list[str], runner: Runner, clock: Clock,
    environ: Mapping[str, str], say: Say, force: bool = False,
) -> BuildResult:  # fmt: skip
    """Build the image unless one of the same inputs is there.

    On any error, and when interrupted, what was there before is unchanged and nothing else is left.

    Args:
        say: told each new line of progress.
        force: build in any case.

    Raises:
        HpctrainError: the build failed, or what it gave is not the image that was asked for.
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
            # Forced, labels of a base that hpctrain built too are replaced.
            argv = [runtime.path, "build", "--force", *options, str(temporary), str(file)]
            code = _run(argv, env, log, runner, clock, say)
            said = _lines(log)
        if code != 0 or not temporary.exists():
            raise HpctrainError(f"{image}: {runtime.name} build ended with {code}: {_reason(said)}")
        if not _is_of(temporary, inputs, runtime, runner):
            raise HpctrainError(f"{image}: what {runtime.name} built does not carry the label {INPUTS}; not kept")
        with storage_errors(image):
            temporary.replace(image)
            sync_folder(image.parent)
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
    """Whole lines, without colours."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [_COLOURS.sub("", line).strip() for line in text.split("\n")[:-1] if line.strip()]


def _reason(lines: list[str]) -> str:
    """The last two lines that say more than where the build was."""
    words = [
        line for line in lines if not line.startswith(("INFO:", "WARNING:", "+", "FATAL:   While performing build"))
    ]
    return " | ".join(words[-2:]) or (lines[-1] if lines else "it said nothing")
