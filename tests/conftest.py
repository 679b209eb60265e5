"""What all tests share: parts of a machine that a test may need, and the check that no process outlives the suite.

A test pays for what it is about. torch is loaded once for all launches of processes that compare plans, and once for
all runs of tests/train. Plans are compared with one process over two steps, the second of which uses the moments of the
first, and validated in both. A compiled block is compiled for the plain processor, so the vector code of torch's
compiler is not run. On the lab a run's files are read every 0.2 s, but `hpctrain status` is asked every 3 s, as it
takes half a second of the processor time that the run needs; a run that a test ends by itself pauses before each step.

A test shows the same on a busy machine. Workers are held before a step until the test has caused its fault. Where nodes
are measured, either the degrees are fixed, or what is asserted follows from the figures. Limits of waits only end a
hang, so they count several times.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Until all tests are collected: almost all that is made meanwhile stays, and looking for garbage would take a third of
# the time.
gc.disable()

# Several workers share this machine's cores: one thread each, unless somebody says otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The suite starts hundreds of processes, and each would compile every module and every test anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell without job control starts a part of the suite with Ctrl-C ignored, which the commands under test inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where tools/install-slurm-next puts a newer Slurm than this machine's own.
os.environ.setdefault("HPCTRAIN_SLURM_NEXT", "/opt/slurm-next")
WORKFLOWS = REPOSITORY / "build" / "workflows"
"""A virtual environment with Snakemake and a parser of Nextflow's language, made by tools/install-workflows."""
AFTER_TRAINING = REPOSITORY / "build" / "after-training"
"""A virtual environment with lm-evaluation-harness and a converter to GGUF, made by tools/install-after-training."""

# How long an example takes says more about the machine's load than about the code.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")

# Every process that a test starts inherits this, however far it detaches itself.
MARK, MARK_VALUE = "HPCTRAIN_TEST_SESSION", f"{os.getpid()}-{time.time_ns()}"
GRACE_S = 10.0
"""Seconds in which processes may end that were told to; on a busy machine it takes a while."""

STATE = Path(tempfile.gettempdir()) / f"hpctrain-tests-{MARK_VALUE}"
"""Instead of the folder in which the person's history of runs lies; removed at the end."""
_STATES = itertools.count()


def data_folder() -> Path:
    """Measured runs that are published elsewhere: $HPCTRAIN_DATA, else ../shared/data."""
    return Path(os.environ.get("HPCTRAIN_DATA") or REPOSITORY.parent / "shared" / "data")


@pytest.fixture
def small_files() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with small_files(n):` no file of this process can grow beyond n bytes, which reads like a full disk.

    Only around the call under test: pytest's own output may go to a file that is longer already.
    """

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def no_descriptors() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with no_descriptors():` this process can open no more files ("Too many open files")."""

    @contextlib.contextmanager
    def used_up() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.dup(0)]
        try:
            open_now = max(int(number) for number in os.listdir("/proc/self/fd"))  # noqa: PTH208
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 16, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            yield
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    return used_up


def _missing_root() -> str | None:
    return None if os.getuid() == 0 else "the tests do not run as root"


def _missing_cuda() -> str | None:
    if Path("/dev/nvidiactl").exists():
        return None
    return "there is no CUDA device (/dev/nvidiactl)"


def _missing_userns() -> str | None:
    unshare = shutil.which("unshare")
    if unshare is None:
        return "the command unshare is not installed (Debian: util-linux)"
    done = subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return None if done.returncode == 0 else "this user may not mount a file system of its own (user namespaces)"


def _missing_cxx() -> str | None:
    return None if shutil.which("g++") else "g++ is not installed; torch.compile makes C++ code on a CPU"


def _missing_measured_runs() -> str | None:
    path = data_folder() / "measured_runs.csv"
    return None if path.is_file() else f"there is no {path}; HPCTRAIN_DATA names the folder that holds it"


def _missing_slurm() -> str | None:
    missing = [program for program in ("slurmctld", "slurmd", "munged") if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)} (`hpctrain lab up --install`)" if missing else None


@functools.cache
def _missing_lab() -> str | None:
    if os.getuid() != 0:
        return "the tests do not run as root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (Debian: iproute2)"
    name = f"hpctrain-test-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"root may not make a network namespace here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def _missing_slurm_next() -> str | None:
    prefix = Path(os.environ["HPCTRAIN_SLURM_NEXT"])
    there = (prefix / "sbin" / "slurmd").exists()
    return None if there else f"there is no newer Slurm in {prefix} (`tools/install-slurm-next`)"


def _missing_shellcheck() -> str | None:
    return None if shutil.which("shellcheck") else "shellcheck is not installed (Debian: shellcheck)"


def _missing_apptainer() -> str | None:
    return None if shutil.which("apptainer") else "apptainer is not installed (Debian 12: tools/install-apptainer)"


def _missing_transformers() -> str | None:
    there = importlib.util.find_spec("transformers") is not None
    return None if there else "transformers is not installed (`pip install 'transformers>=4.45'`)"


def _missing_triton() -> str | None:
    if importlib.util.find_spec("triton") is not None:
        return None
    return "triton is not installed (`make venv` installs it on x86-64)"


def _missing_chromium() -> str | None:
    there = shutil.which("chromium") is not None
    return None if there else "chromium is not installed (Debian: tools/install-chromium)"


def _missing_workflows() -> str | None:
    there = (WORKFLOWS / "bin" / "snakemake").exists()
    return None if there else f"there is no Snakemake in {WORKFLOWS} (`make workflows`)"


def _missing_after_training() -> str | None:
    there = (AFTER_TRAINING / "bin" / "lm_eval").exists()
    return None if there else f"there is no lm_eval in {AFTER_TRAINING} (`make after-training`)"


PARTS: dict[str, Callable[[], str | None]] = {
    "root": _missing_root,
    "userns": _missing_userns,
    "cuda": _missing_cuda,
    "cxx": _missing_cxx,
    "measured_runs": _missing_measured_runs,
    "slurm": _missing_slurm,
    "slurm_next": _missing_slurm_next,
    "lab": _missing_lab,
    "shellcheck": _missing_shellcheck,
    "apptainer": _missing_apptainer,
    "transformers": _missing_transformers,
    "triton": _missing_triton,
    "chromium": _missing_chromium,
    "workflows": _missing_workflows,
    "after_training": _missing_after_training,
}
"""Part of a machine -> why it is missing, or None where it is there."""


def required() -> set[str]:
    """Parts that must be there: a test that needs one of them fails instead of being left out."""
    return {part for part in os.environ.get("HPCTRAIN_REQUIRE", "").split(",") if part}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        for part in marker.args:
            if part not in PARTS:
                pytest.fail(f"requires({part!r}): allowed: {', '.join(PARTS)}", pytrace=False)
            reason = PARTS[part]()
            if reason is None:
                continue
            if part in required():
                pytest.fail(f"{part} is missing though HPCTRAIN_REQUIRE names it: {reason}", pytrace=False)
            pytest.skip(f"{part}: {reason}")


@pytest.fixture(scope="session")
def small_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real image for runs on this machine: its Debian Python; it sees the packages of this installation.

    Mark the test with requires("apptainer", "root").
    """
    image = tmp_path_factory.mktemp("image") / "small.sif"
    words = ["image", "build", "--base", "cpu-small", "-o", str(image)]
    subprocess.run([sys.executable, "-m", "hpctrain", *words], check=True)
    return image


@pytest.fixture
def short_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that end soon, for tests of something else than how fast a plan is: the annealing of plans that are the
    fastest already takes four fifths of the time of a search on few devices."""
    from hpctrain.planner.limits import DEFAULT_LIMITS  # not where no plan is made

    monkeypatch.setitem(vars(DEFAULT_LIMITS), "annealing_work", DEFAULT_LIMITS.annealing_work / 20)


@pytest.fixture
def measured_runs() -> Path:
    """The table of published, measured training runs; mark the test with requires("measured_runs")."""
    return data_folder() / "measured_runs.csv"


@pytest.fixture(scope="session")
def workflows() -> Path:
    """Programs of Snakemake's environment; mark the test with requires("workflows")."""
    return WORKFLOWS / "bin"


@pytest.fixture(scope="session")
def after_training() -> Path:
    """Programs that use an exported model; mark the test with requires("after_training")."""
    return AFTER_TRAINING / "bin"


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return REPOSITORY


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = MARK_VALUE
    os.environ["XDG_STATE_HOME"] = str(STATE)


def pytest_collection_finish() -> None:
    """Leave the modules and tests that were loaded out of all later garbage collections."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def state_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's history of runs goes: never into the home folder, and no other test sees it."""
    path = STATE / str(next(_STATES))
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last fixture is gone no process of the suite may be left: it is named, ended, and the suite fails."""
    shutil.rmtree(STATE, ignore_errors=True)
    if "forked_python" in sys.modules:
        sys.modules["forked_python"].close()
    if getattr(session.config.option, "numprocesses", None) or hasattr(session.config, "workerinput"):
        return  # pytest-xdist's own workers would be taken for survivors
    left = list(_survivors())
    session.config.stash[_LEFT] = [_describe(process) for process in left]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _survivors() -> Iterator[psutil.Process]:
    deadline = time.monotonic() + GRACE_S
    left = _marked()
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _marked()
    yield from left


def _marked() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != MARK_VALUE:
            return False
        # Python's own helpers live exactly as long as this process.
        helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
        return not any(helper in part for part in process.cmdline() for helper in helpers)
    except psutil.Error:
        return False  # somebody else's, or already gone


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}: ended by now"


_LEFT: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out, test by test, and what was left behind."""
    skipped = terminalreporter.getreports("skipped")
    if skipped:
        terminalreporter.section("left out on this machine")
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            terminalreporter.write_line(f"{report.nodeid}  ({reason.removeprefix('Skipped: ')})")
    left = config.stash.get(_LEFT, [])
    if left:
        terminalreporter.section("processes that outlived the tests", red=True)
        for text in left:
            terminalreporter.write_line(text)
