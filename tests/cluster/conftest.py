"""A lab of four nodes for all tests of a real cluster: built once, healed and emptied after each test.

@pytest.mark.slow
@pytest.mark.requires("slurm", "lab")
def test_of_a_cluster(cluster):
    cluster.run("srun", "-N4", "hostname")
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest
import yaml
from real_text import prepare_text
from submitted import RUN, Project

from hpctrain import __version__
from hpctrain.lab import faults
from hpctrain.lab.layout import load_layout
from hpctrain.lab.machine import this_machine
from hpctrain.records.topology.link import BackendFigures, LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology, Verdict

FOLDER = Path("/run/hpctrain-lab-tests")
PACE = Path(__file__).with_name("pace")
PATIENCE = 3
SAID_LAST = 40
"""Lines of each daemon's log."""


class Cluster:
    """The lab as a user of it sees it: Slurm's commands, and `hpctrain lab`."""

    nodes = ("node0", "node1", "node2", "node3")

    def __init__(self, folder: Path, prefix: Path | None = None) -> None:
        """
        Args:
            prefix: folder of the Slurm that it runs, where that is not this machine's own.
        """
        self.folder, self._prefix = folder, prefix
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))},
            "HPCTRAIN_LAB": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACE), os.environ.get("PYTHONPATH")])),
        }
        if prefix is not None:
            self.env["PATH"] = f"{prefix / 'bin'}:{os.environ['PATH']}"

    def run(self, *argv: str, timeout_s: float = 270, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command against the lab; when it must succeed and does not, its words are in the failure."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0 or not check, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *argv: str, log: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command against the lab."""
        with (log or Path(os.devnull)).open("ab") as output:
            return subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def lab(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`hpctrain lab WORDS`."""
        return self.run(sys.executable, "-m", "hpctrain", "lab", *words, check=check)

    def kill(self, *nodes: str) -> None:
        """What `hpctrain lab kill` does, at once: the run under test goes on while a command starts."""
        faults.kill_nodes(this_machine(), load_layout(self.folder), nodes)

    def cut(self, a: str, b: str) -> None:
        """What `hpctrain lab cut` does, at once."""
        faults.cut(this_machine(), load_layout(self.folder), a, b)

    def shape(self, rate: str, *nodes: str) -> None:
        """What `hpctrain lab shape` does; of all nodes unless some are named. A link far slower than this machine is
        measured alike by a busy one, whose probe would else leave nodes out because they seem slow."""
        layout = load_layout(self.folder)
        faults.shape(this_machine(), layout, nodes or layout.names, rate)

    def heal(self, *nodes: str) -> None:
        """What `hpctrain lab heal` does; of all nodes unless some are named."""
        layout = load_layout(self.folder)
        faults.heal(this_machine(), layout, nodes or layout.names)

    def up(self) -> None:
        """Build it."""
        self.lab("up", "--nodes", "4", *(() if self._prefix is None else ("--slurm", str(self._prefix))))

    def node_state(self, node: str) -> str:
        """As sinfo says: 'idle', 'down*'."""
        return self.run("sinfo", "--noheader", "--partition=low", f"--nodes={node}", "--format=%t").stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, NodeList, …"""
        words = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout.split()
        return {key: value for key, found, value in (word.partition("=") for word in words) if found}

    def controller(self) -> psutil.Process:
        """The lab's slurmctld."""
        conf = str(self.folder / "slurm.conf")
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "slurmctld" and conf in (process.info["cmdline"] or []):
                return process
        raise AssertionError("no slurmctld of this lab")

    def wait(
        self, until: Callable[[], object], timeout_s: float, what: str | Callable[[], str], every_s: float = 0.2
    ) -> float:
        """Seconds until it was so; a failure that says `what` otherwise. The limit ends a hang, and no more than that:
        it counts threefold, for machines with other work. What starts a Python of its own is asked less often."""
        began = time.monotonic()
        while not until():
            if time.monotonic() - began > PATIENCE * timeout_s:
                pytest.fail(f"not within {PATIENCE * timeout_s:g} s: {what if isinstance(what, str) else what()}")
            time.sleep(every_s)
        return time.monotonic() - began

    @contextlib.contextmanager
    def short_messages(self) -> Iterator[None]:
        """Within it the controller waits for the answer of a dead node for less time than a living one may be silent.
        Slurm 24.11 asks all nodes in one go: with equal times, a dead one lets the living ones look silent, too."""
        with self._configured(lambda text: f"{text}\nMessageTimeout=4\n"):
            yield

    @contextlib.contextmanager
    def slow_to_give_up(self) -> Iterator[None]:
        """Within it Slurm waits for a silent node for minutes, as most clusters do, and the grace time of a preemption
        is as long as a busy machine may need: what happens is what the test does."""
        silent = re.compile(r"^SlurmdTimeout=.*$", re.MULTILINE)
        try:
            with self._configured(lambda text: silent.sub("SlurmdTimeout=600", text)):
                self.run("scontrol", "update", "PartitionName=low", "GraceTime=120")
                yield
        finally:
            self.run("scontrol", "update", "PartitionName=low", "GraceTime=10")

    @contextlib.contextmanager
    def _configured(self, change: Callable[[str], str]) -> Iterator[None]:
        """Within it the daemons have the lab's slurm.conf with a change."""
        conf = self.folder / "slurm.conf"
        text = conf.read_text()
        conf.write_text(change(text))
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            conf.write_text(text)
            self.run("scontrol", "reconfigure")

    def is_up(self) -> bool:
        return (self.folder / "ready").exists()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked with slurms("own", "next") runs on a lab of each; without the mark, on this machine's own Slurm."""
    marker = metafunc.definition.get_closest_marker("slurms")
    if marker is None:
        return
    newer = pytest.param(Path(os.environ["HPCTRAIN_SLURM_NEXT"]), id="next", marks=pytest.mark.requires("slurm_next"))
    known = {"own": pytest.param(None, id="own"), "next": newer}
    metafunc.parametrize("lab", [known[name] for name in marker.args], indirect=True, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure tells what Slurm's daemons said last: their lab is gone when somebody reads it."""
    report = yield
    if report.failed:
        for log in sorted((FOLDER / "log").glob("slurm*.log")):
            lines = log.read_text(errors="replace").splitlines()
            report.sections.append((log.name, "\n".join(lines[-SAID_LAST:])))
    return report


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The lab of the test session. A test may take it down: whoever asks for `cluster` next builds it again."""
    lab = Cluster(FOLDER, getattr(request, "param", None))
    lab.up()
    yield lab
    lab.lab("down")


@pytest.fixture
def cluster(lab: Cluster) -> Iterator[Cluster]:
    """A healthy lab of four idle nodes; jobs and faults of the test are gone after it."""
    if not lab.is_up():
        lab.up()
    yield lab
    if lab.is_up():
        lab.run("scancel", "--user=root", "--full")
        lab.heal()
        every = ",".join(lab.nodes)
        # One line a state, so one word when all nodes are alike.
        lab.wait(lambda: lab.node_state(every) == "idle", 60, "all nodes idle after the test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a run file."""
    path = tmp_path_factory.mktemp("project")
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture(scope="session")
def topology(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's four nodes and their links, with figures that a probe once had of them."""
    if not lab.is_up():
        lab.up()
    layout = load_layout(lab.folder)
    device = Device(
        id="cpu0", type="cpu", flops={"fp32": 1e10}, memory_bytes=4e9, memory_bytes_per_s=2e9, launch_s=1e-6
    )
    gloo = BackendFigures(alpha_s=4e-4, beta_s_per_byte=8e-9)
    links = LinkClass(id="network", alpha_s=1.4e-5, beta_s_per_byte=8e-9, pairs=6, backend={"gloo": gloo})
    path = tmp_path_factory.mktemp("topology") / "topology.json"
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    Topology(
        provenance=Provenance(version=__version__, created=now, transport="tcp", loopback=False),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr=layout.address(name), iface="eth0", devices=[device]) for name in lab.nodes],
        fabric=Fabric(classes=[links]),
        verdict=Verdict(env={"GLOO_SOCKET_IFNAME": "eth0"}),
    ).write(path)
    return path


@pytest.fixture
def project(cluster, prepared: Path, topology: Path) -> Project:
    """The same, with the topology."""
    shutil.copy(topology, prepared)
    return Project(cluster, prepared)
