"""Examines an image, and judges whether runs from this machine work in it.

The image is started as a run starts it. A program inside reports what it sees, and gets the signals that Slurm sends.
`check_image` makes findings of what was seen inside and outside.
"""

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
from typing import Any, Literal

import psutil

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import Runner, end_process
from hpctrain.container import entry
from hpctrain.container.entry import LIBRARY, Bind
from hpctrain.records.run.run import Container

Level = Literal["ok", "note", "problem"]
SAME_VERSION_PACKAGES = ("submitit", "cloudpickle")
"""Packages that need equal versions inside and outside the image: a job's task uses them to read what `submit`
wrote."""
REQUIRED_PACKAGES = (
    "click",
    "ClusterShell",
    "numpy",
    "nvidia-ml-py",
    "psutil",
    "pydantic",
    "pyyaml",
    "safetensors",
    "scipy",
    "tokenizers",
)
SLOW_START_S = 5.0
CUDA_OF_DRIVER = ((580, (13, 0)), (525, (12, 0)), (450, (11, 0)))
"""(oldest major version of NVIDIA's driver, CUDA version that such a driver supports), newest first. Within a major
version of CUDA all minor versions are compatible (CUDA's release notes, table 2)."""
EXAMINE_TIMEOUT_S = 300.0
READY_S = 60.0
SIGNALS_S = 30.0
POLL_S = 0.05
_ISOLATION_SETTINGS = ("COMPAT", "CONTAIN", "CONTAINALL", "NO_HOME", "CLEANENV", "NO_MOUNT")
_INSIDE = f"{LIBRARY}/hpctrain/container/inside.py"


@dataclass(frozen=True)
class ImageFinding:
    """The result of one check of an image. Its level is `problem` if a run would fail, `note` for a disadvantage, else
    `ok`."""

    name: str
    """What was checked, such as 'python'."""
    level: Level
    value: str
    """What was found, for the printed line."""
    words: str = ""
    """What the value means and what the user should do; '' if all is well."""


@dataclass(frozen=True)
class HostEnvironment:
    """Facts about this machine and its Python with which the image is compared."""

    python: str
    """Version of Python."""
    packages: Mapping[str, str]
    """Package -> its version, for the packages that must be the same inside and outside."""
    driver: str | None
    """Version of the NVIDIA driver; None if none is loaded."""
    infiniband: Sequence[str]
    """Names of the device files in /dev/infiniband."""
    contained: Sequence[str]
    """Names of set environment variables that hide the machine from images, such as APPTAINER_COMPAT."""


@dataclass(frozen=True)
class ImageExamination:
    """What an image showed when it was started."""

    inside: Mapping[str, Any]
    """The JSON object that inside.py printed."""
    signals: Sequence[str]
    """Names of the signals that reached a process inside when SIGTERM and SIGUSR2 went to all processes of the image,
    as Slurm sends them."""
    survived: bool
    """Whether the process that got the signals could read from the image afterwards."""
    starts_s: Sequence[float]
    """Seconds that the first and the second start took."""
    file_system: str
    """Type of the file system that holds the image."""


def check_image(outside: HostEnvironment, seen: ImageExamination) -> list[ImageFinding]:
    """Return all findings about an image, in the order in which they are printed.

    Args:
        outside: facts about this machine.
        seen: what the image showed.
    """
    torch = seen.inside["torch"]
    findings = [_python(outside, seen), *_packages(outside, seen), _torch(torch)]
    if "error" not in torch:
        findings += [_gloo(torch), *_gpu(outside, seen, torch)]
    if outside.infiniband:
        lost = not seen.inside["infiniband"]
        words = "the devices are not seen inside: set `mount dev = yes`, or do without --contain" if lost else ""
        findings.append(_required("infiniband", ", ".join(outside.infiniband), words))
    findings += [_folder(name, seen.inside[name]) for name in ("home", "temporary", "shared_memory")]
    if outside.contained:
        words = "hides home, /tmp and devices from the image: unset it"
        findings.append(_required("environment", ", ".join(outside.contained), words))
    return [*findings, _signals(seen), _start_time(seen)]


def _required(name: str, value: str, wrong: str) -> ImageFinding:
    """Return a finding about something that a run needs: of level problem if `wrong` is not empty, else of level ok.

    Args:
        name: what was checked, such as 'python'.
        value: what was found, for the printed line.
        wrong: what is wrong and what to do; '' if all is well.
    """
    return ImageFinding(name, "problem" if wrong else "ok", value, wrong)


def worst_level(findings: Sequence[ImageFinding]) -> Level:
    """Return the worst level among the findings: problem, note or ok."""
    levels = {finding.level for finding in findings}
    return "problem" if "problem" in levels else "note" if "note" in levels else "ok"


def _python(outside: HostEnvironment, seen: ImageExamination) -> ImageFinding:
    inside = str(seen.inside["python"])
    same = inside.split(".")[:2] == outside.python.split(".")[:2]
    words = "" if same else f"here it is {outside.python}: the minor versions must agree, submit and task share pickles"
    return _required("python", inside, words)


def _packages(outside: HostEnvironment, seen: ImageExamination) -> list[ImageFinding]:
    inside: Mapping[str, str | None] = seen.inside["packages"]
    findings = []
    for name in SAME_VERSION_PACKAGES:
        here, there = outside.packages.get(name), inside.get(name)
        words = "" if here == there else f"here it is {here}; build the image again, or install that version in it"
        findings.append(_required(name, there or "missing", words))
    missing = [name for name in REQUIRED_PACKAGES if inside.get(name) is None]
    words = "hpctrain needs them: build the image with `hpctrain image build`" if missing else ""
    value = f"missing: {', '.join(missing)}" if missing else f"{len(REQUIRED_PACKAGES)} are there"
    return [*findings, _required("packages", value, words)]


def _torch(torch: Mapping[str, Any]) -> ImageFinding:
    if "error" in torch:
        words = "torch cannot be imported inside; an image of --base cpu-small sees the packages installed here"
        return ImageFinding("torch", "problem", str(torch["error"]), words)
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU"
    return ImageFinding("torch", "ok", f"{torch['version']} ({build})")


def _gloo(torch: Mapping[str, Any]) -> ImageFinding:
    words = "" if torch["gloo"] else "torch was built without it; runs on CPUs and saving need it"
    return _required("gloo", "there" if torch["gloo"] else "missing", words)


def _gpu(outside: HostEnvironment, seen: ImageExamination, torch: Mapping[str, Any]) -> list[ImageFinding]:
    if outside.driver is None:
        words = "no NVIDIA driver here: this part can only be judged on a node with GPUs" if torch["cuda"] else ""
        return [ImageFinding("driver", "note", "none", words)] if words else []
    if not torch["cuda"]:
        return [ImageFinding("driver", "note", outside.driver, "the image's torch uses no NVIDIA GPUs")]
    known = [newest for oldest, newest in CUDA_OF_DRIVER if int(outside.driver.partition(".")[0]) >= oldest]
    wanted = int(str(torch["cuda"]).partition(".")[0])
    old = not known or known[0][0] < wanted
    words = f"too old for CUDA {torch['cuda']}: build with an older --cuda" if old else ""
    findings = [_required("driver", outside.driver, words)]
    there = seen.inside["nvidia"] and torch["devices"]
    words = "" if there else "container.nv: auto or yes makes them visible"
    findings.append(_required("GPUs", f"{torch['devices']}" if there else "none seen inside", words))
    words = "" if torch["nccl"] else "torch was built without it: GPUs of several nodes cannot work together"
    return [*findings, _required("NCCL", torch["nccl"] or "missing", words)]


def _folder(name: str, reason: str | None) -> ImageFinding:
    words = "" if reason is None else "cannot be written to inside; bind it, or leave out --contain and --no-home"
    level: Level = "ok" if reason is None else "note" if name == "home" else "problem"
    return ImageFinding(name.replace("_", " "), level, "can be written to" if reason is None else reason, words)


def _signals(seen: ImageExamination) -> ImageFinding:
    missing = [name for name in ("SIGTERM", "SIGUSR2") if name not in seen.signals]
    if missing:
        words = "a preempted run could not save: use Apptainer without a wrapper of the site's own"
        return _required("signals", f"not delivered: {', '.join(missing)}", words)
    if not seen.survived:
        words = (
            "the image's files vanish when Slurm signals a job, before it has saved; a folder instead of a .sif "
            "(`apptainer build --sandbox`) does not have that"
        )
        return _required("signals", "delivered, and end the image's file system", words)
    return _required("signals", "SIGTERM and SIGUSR2 are delivered", "")


def _start_time(seen: ImageExamination) -> ImageFinding:
    value = (
        f"{seen.starts_s[0]:.2f} s, then {seen.starts_s[1]:.2f} s, from {seen.file_system or 'an unknown file system'}"
    )
    slow = seen.starts_s[1] > SLOW_START_S
    words = "every node starts it once an attempt: put the image on a faster file system" if slow else ""
    return ImageFinding("start", "note" if slow else "ok", value, words)


@dataclass(frozen=True)
class ImageStart:
    """Everything that determines how an image is started on this machine."""

    container: Container
    runtime: entry.Runtime
    host: entry.Host
    binds: Sequence[Bind]
    environ: Mapping[str, str]
    """Environment of the process that starts the image."""
    which: entry.Which
    """`shutil.which`, or a test's replacement."""

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the argv that runs `words` inside the image."""
        return entry.entry_command(self.runtime, self.host, self.container, self.binds, words)

    def environment(self, tools: Path) -> dict[str, str]:
        """Return the environment with which the image is started.

        Args:
            tools: empty folder, which gets the script that lets the image's mount survive signals.

        Raises:
            StorageError: the script cannot be written.
        """
        env = entry.entry_environment(self.container, self.environ, self.runtime.prefix)
        return entry.with_surviving_mount(env, tools, self.which, alone=True)


def host_environment(environ: Mapping[str, str], driver: str | None) -> HostEnvironment:
    """Return the facts about this machine and this Python that an image has to match.

    Args:
        driver: version of the NVIDIA driver; None if none is loaded.
    """
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

    Args:
        file_system: type of the file system that holds the image.

    Raises:
        HpctrainError: the image cannot be started, or has no Python; the message quotes the runtime.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-image-") as folder:
        env = image.environment(Path(folder, "tools"))
        times = [_start(image, env, runner, clock) for _ in range(2)]
        done = runner.run(
            image.command([entry.PYTHON, _INSIDE, "look", *SAME_VERSION_PACKAGES, *REQUIRED_PACKAGES]),
            timeout_s=EXAMINE_TIMEOUT_S,
            env=env,
        )
        inside = _answer(done.stdout)
        if inside is None:
            raise HpctrainError(f"{image.container.image}: {_last(done.stderr) or f'it ended with {done.code}'}")
        came, survived = _signalled(image, env, Path(folder, "signals.log"), runner, clock)
    return ImageExamination(inside, came, survived, times, file_system)


def _start(image: ImageStart, env: Mapping[str, str], runner: Runner, clock: Clock) -> float:
    """Return the seconds that it takes to start and end Python inside the image.

    Args:
        env: environment with which the image is started.

    Raises:
        HpctrainError: Python could not be started in the image.
    """
    before = clock.now()
    done = runner.run(image.command([entry.PYTHON, "-S", "-c", "pass"]), timeout_s=EXAMINE_TIMEOUT_S, env=env)
    if done.code != 0:
        why = _last(done.stderr) or f"code {done.code}"
        raise HpctrainError(f"{image.container.image}: {entry.PYTHON} cannot be started in it: {why}")
    return clock.now() - before


def _signalled(
    image: ImageStart, env: Mapping[str, str], log: Path, runner: Runner, clock: Clock
) -> tuple[list[str], bool]:
    """Send SIGUSR2 and SIGTERM to all processes of a started image.

    Return the names of the signals that reached a process inside, and whether this process could read files of the
    image afterwards. If the process died without an answer, the signals count as delivered, and the files as
    unreadable.
    """
    process = runner.start(image.command([entry.PYTHON, _INSIDE, "signals"]), env=env, log=log)
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
    """Send a signal to a process and all its descendants, as Slurm signals all processes of a job step."""
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
