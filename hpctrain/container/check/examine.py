"""Examine an image: start it as a run starts it, let it report what it sees, and send it Slurm's signals."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import Runner, end_process
from hpctrain.container.check.findings import (
    REQUIRED_PACKAGES,
    SAME_VERSION_PACKAGES,
    HostEnvironment,
    ImageExamination,
)
from hpctrain.container.run.binds import LIBRARY, Bind
from hpctrain.container.run.entry import PYTHON, entry_command, entry_environment
from hpctrain.container.run.runtime import Host, Runtime, Which
from hpctrain.container.run.surviving_mount import with_surviving_mount
from hpctrain.records.run.run import Container

EXAMINE_TIMEOUT_S = 300.0
READY_S = 60.0
SIGNALS_S = 30.0
POLL_S = 0.05
_ISOLATION_SETTINGS = ("COMPAT", "CONTAIN", "CONTAINALL", "NO_HOME", "CLEANENV", "NO_MOUNT")
_INSIDE = f"{LIBRARY}/hpctrain/container/check/inside.py"


@dataclass(frozen=True)
class ImageStart:
    """Everything that determines how the image is started."""

    container: Container
    runtime: Runtime
    host: Host
    binds: Sequence[Bind]
    environ: Mapping[str, str]
    which: Which

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the argv that runs `words` inside the image."""
        return entry_command(self.runtime, self.host, self.container, self.binds, words)

    def environment(self, tools: Path) -> dict[str, str]:
        """Return the environment that the image is started with; `tools` is an empty folder."""
        env = entry_environment(self.container, self.environ, self.runtime.prefix)
        return with_surviving_mount(env, tools, self.which, alone=True)


def host_environment(environ: Mapping[str, str], driver: str | None) -> HostEnvironment:
    """Return the facts about this machine and this Python that an image has to match."""
    infiniband = Path("/dev/infiniband")
    names = [f"{maker}_{name}" for maker in ("APPTAINER", "SINGULARITY") for name in _ISOLATION_SETTINGS]
    return HostEnvironment(
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in SAME_VERSION_PACKAGES},
        driver=driver,
        infiniband=sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else [],
        contained=[name for name in names if environ.get(name)],
    )


def examine(image: ImageStart, file_system: str, runner: Runner, clock: Clock) -> ImageExamination:
    """Start the image four times: twice to time the start, once to report what it sees, once to be signalled.

    Raises:
        HpctrainError: the image cannot be started, or has no Python; the message quotes the runtime.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-image-") as folder:
        env = image.environment(Path(folder, "tools"))
        times = [_start(image, env, runner, clock) for _ in range(2)]
        done = runner.run(
            image.command([PYTHON, _INSIDE, "look", *SAME_VERSION_PACKAGES, *REQUIRED_PACKAGES]),
            timeout_s=EXAMINE_TIMEOUT_S,
            env=env,
        )
        inside = _answer(done.stdout)
        if inside is None:
            raise HpctrainError(f"{image.container.image}: {_last(done.stderr) or f'it ended with {done.code}'}")
        came, survived = _signalled(image, env, Path(folder, "signals.log"), runner, clock)
    return ImageExamination(inside, came, survived, times, file_system)


def _start(image: ImageStart, env: Mapping[str, str], runner: Runner, clock: Clock) -> float:
    """Return the seconds that it takes to start and end Python inside the image."""
    before = clock.now()
    done = runner.run(image.command([PYTHON, "-S", "-c", "pass"]), timeout_s=EXAMINE_TIMEOUT_S, env=env)
    if done.code != 0:
        raise HpctrainError(
            f"{image.container.image}: {PYTHON} cannot be started in it: {_last(done.stderr) or f'code {done.code}'}"
        )
    return clock.now() - before


def _signalled(
    image: ImageStart, env: Mapping[str, str], log: Path, runner: Runner, clock: Clock
) -> tuple[list[str], bool]:
    """Return the signals that reached a process inside, and whether it could read from the image afterwards."""
    process = runner.start(image.command([PYTHON, _INSIDE, "signals"]), env=env, log=log)
    try:
        deadline = clock.now() + READY_S
        while "ready" not in log.read_text() and process.poll() is None and clock.now() < deadline:
            clock.sleep(POLL_S)
        for number in (signal.SIGUSR2, signal.SIGTERM):
            _signal_all(process.pid, number)
        process.wait(SIGNALS_S)
        answer = _answer(log.read_text())
    finally:
        end_process(process)
    return (answer["came"], True) if answer else (["SIGTERM", "SIGUSR2"], False)


def _signal_all(pid: int, number: signal.Signals) -> None:
    """Signal a process and all its descendants, as Slurm signals a step."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _answer(text: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of `text`; None if there is none."""
    try:
        answer = json.loads(_last(text))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
