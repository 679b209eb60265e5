"""A run as a Slurm job on the lab: submitted, watched, hit by every fault, and finished all the same."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from followed import Followed

from hpctrain.records.event import read_events
from hpctrain.records.metric import effective, read_metrics
from hpctrain.records.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]

RUN = {
    "name": "job",
    "steps": 90,
    "seed": 3,
    "cluster": {"kind": "slurm", "partition": "low", "nodes": "3-4", "time": "20", "device": "cpu"},
    "model": {"dims": {"layers": 4, "dim": 64, "heads": 4}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 12},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 10, "keep": 2},
    "validation": {"batches": 0},
}


@dataclass
class Project:
    """A folder with a corpus and a run file, on the lab."""

    cluster: object
    path: Path

    def hpctrain(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", *words],
            cwd=self.path, env=self.cluster.env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *words: str) -> Job:
        return self.job(json.loads(self.hpctrain("submit", "run.yaml", "--json", "-t", "topology.json", *words).stdout))

    def job(self, told: dict[str, str]) -> Job:
        """The run that `submit --json` told of."""
        return Job(self, told["name"], Path(told["folder"]), told["job_id"])


@dataclass
class Job:
    """A submitted run."""

    project: Project
    name: str
    folder: Path
    job_id: str

    def status(self) -> dict[str, object]:
        return json.loads(self.project.hpctrain("status", self.name, "--json").stdout)

    def steps(self) -> int:
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows[-1].step if rows else 0

    def attempts(self) -> list[dict[str, object]]:
        path = self.folder / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def members(self) -> list[str]:
        """The nodes that train: the planner may leave one out."""
        starts = [event for event in read_events(self.folder / "events.jsonl") if event.kind == "generation_started"]
        return list(starts[-1].data["members"])

    def wait_for_step(self, step: int) -> None:
        self.project.cluster.wait(lambda: self.steps() >= step, 120, lambda: f"step {step}: {self.explain()}")

    def wait_until_done(self, timeout_s: float = 240, script_too: bool = True) -> None:
        self.project.cluster.wait(
            lambda: self.status()["state"] in ("done", "failed", "cancelled"),
            timeout_s, "the run has ended", self.project.cluster.status_every_s,
        )  # fmt: skip
        assert self.status()["state"] == "done", self.explain()
        if script_too:
            self.project.cluster.wait(lambda: "end" in self.attempts()[-1], 150, "the job script has ended")

    def explain(self) -> str:
        return self.project.hpctrain("logs", self.name, "-n", "5", check=False).stdout[-3000:]

    def assert_whole(self, steps: int = 90) -> None:
        """Every step was done, in one metrics file, whatever happened in between."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row.step for row in effective(rows)] == list(range(1, steps + 1))
        generations = [row.generation for row in rows]
        assert generations == sorted(generations)


def listening(folder: Path) -> set[str]:
    """Addresses that agents and workers listen at, each seen from within its own node's network."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) not in words or not {"hpctrain.node", "hpctrain.worker"} & set(words):
            continue
        links = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()]
        for table in ("tcp", "tcp6"):
            rows = [row.split() for row in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]]
            found |= {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}
    # As the kernel writes IPv4 addresses: the bytes the wrong way round, in hex.
    return {socket.inet_ntoa(bytes.fromhex(place.partition(":")[0])[::-1]) for place in found}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    root = Path(__file__).resolve().parents[2]
    words = ["data", "prepare", str(root / "hpctrain"), "-o", str(path / "data"), "--tokenizer", "bytes"]
    subprocess.run([sys.executable, "-m", "hpctrain", *words], check=True, capture_output=True)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture
def project(cluster, prepared: Path) -> Project:
    project = Project(cluster, prepared)
    if not (prepared / "topology.json").exists():
        done = project.hpctrain("probe", "-N", "4", "-p", "low", "-o", "topology.json", check=False)
        # On a busy machine "go with warnings" will do.
        assert done.returncode in (0, 3), done.stderr
    return project


def test_a_probe_is_a_job_that_sees_the_slow_node(cluster, prepared: Path) -> None:
    project = Project(cluster, prepared)
    for node in cluster.nodes:
        cluster.lab("shape", node, "--rate", "480mbit")
    cluster.lab("shape", "node2", "--rate", "120mbit")
    done = project.hpctrain("probe", "-N", "4", "-p", "low", "-o", "slow.json", check=False)
    assert done.returncode in (0, 3), done.stderr
    topology = Topology.read(prepared / "slow.json")
    assert [node.id for node in topology.nodes] == list(cluster.nodes)
    assert not topology.provenance.loopback
    assert topology.provenance.notes == []
    assert all(node.iface == "eth0" and node.host_facts.mtu["eth0"] >= 1280 for node in topology.nodes)
    # Virtual nodes have one clock.
    assert all(abs(node.host_facts.clock_offset_s) < 0.01 for node in topology.nodes[1:])
    assert topology.fabric.classes[0].backend["gloo"].alpha_s > topology.fabric.classes[0].alpha_s
    rates = {
        (link.a, link.b): min(link.ab.isolated_bytes_per_s or 0, link.ba.isolated_bytes_per_s or 0)
        for link in topology.fabric.links
    }
    slow = [rate for pair, rate in rates.items() if "node2" in pair]
    quick = [rate for pair, rate in rates.items() if "node2" not in pair]
    assert len(slow) == len(quick) == 3
    assert max(slow) < 0.35 * min(quick)


def test_a_node_is_lost_and_the_job_comes_back_without_it(project: Project) -> None:
    # Long enough for the commands before the fault, on a busy machine too.
    job = project.submit("--set", "steps=300")
    assert project.hpctrain("status", job.job_id, "--json").stdout
    job.wait_for_step(15)
    lost = job.members()[-1]
    assert job.status()["state"] == "running"
    own = {json.loads(path.read_text())["addr"] for path in (job.folder / "agents").glob("node*.json")}
    assert len(own) >= 3
    assert listening(job.folder) == own
    project.cluster.lab("kill", lost)
    # While the others recover, there is time for this on a busy machine too.
    assert project.hpctrain("exec", job.name, "node0", "--", "hostname").stdout == "node0\n"
    assert project.hpctrain("exec", job.name, "--", "sh", "-c", "exit 7", check=False).returncode == 7
    job.wait_until_done()
    job.assert_whole(300)
    told = [event for event in read_events(job.folder / "events.jsonl") if event.kind == "node_lost"]
    assert lost in {event.data["node"] for event in told}


def test_the_batch_host_is_lost_too(project: Project) -> None:
    """The job script dies with its node; the agents that are left finish the run, or on a slow machine the next job."""
    # Three nodes are enough: once Slurm itself has given the node up, the job comes back without it.
    job = project.submit("--set", "cluster.nodes=3-4")
    job.wait_for_step(15)
    project.cluster.lab("kill", "node0")
    job.wait_until_done(script_too=False)
    job.assert_whole()
    assert "node0" not in job.members()


def test_a_preempted_job_saves_and_comes_back(project: Project) -> None:
    job = project.submit()
    with contextlib.closing(Followed(project.cluster, job.folder, job.folder / "followed")) as followed:
        job.wait_for_step(15)
        assert_survives_preemption(job)
        followed.assert_seen_to_its_end()


TERM_ONLY = """
nodes: [{name: node0}, {name: node1}, {name: node2}, {name: node3}, {name: node4}]
slurm: {preempt_send_user_signal: false}
"""


def test_five_nodes_of_a_cluster_that_preempts_with_term_alone(project: Project, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(TERM_ONLY)
    project.cluster.lab("up", str(tmp_path / "lab.yaml"), "--replace")
    try:
        # The topology file is of four nodes: the job measures its five itself.
        job = project.submit("--set", "cluster.nodes=4-5")
        job.wait_for_step(15)
        assert_survives_preemption(job)
    finally:
        project.cluster.lab("up", "--nodes", "4", "--replace")


def assert_survives_preemption(job: Job) -> None:
    job.project.cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 5", "-o", "/dev/null")
    job.wait_until_done()
    job.assert_whole()
    assert len(job.attempts()) == 2
    assert "back to the queue" in str(job.attempts()[0]["reason"])
    first = [event for event in read_events(job.folder / "events.jsonl") if event.attempt == 0]
    assert "preempted" in {event.kind for event in first}
    # The notice allowed a save: nothing was done twice.
    assert len(read_metrics(job.folder / "metrics.jsonl")) == 90


def test_two_runs_share_the_cluster(project: Project) -> None:
    """One meets its time limit; beside it, the other is requeued by hand, cancelled and resubmitted."""
    short = project.submit(
        "--set", "cluster.nodes=2", "--set", "cluster.time='2'", "--set", "cluster.save_notice_s=55",
        "--set", "steps=100000", "--set", "checkpoint.every=1000",
    )  # fmt: skip
    assert_survives_its_user(project.submit("--set", "cluster.nodes=2"))
    # Two minutes, of which one is kept for saving: the notice comes after the other.
    project.cluster.wait(lambda: len(short.attempts()) >= 2, 120, "the attempt after the time limit")
    assert short.attempts()[0]["reason"] == "stopped before the time limit, saved, and back to the queue"
    assert short.attempts()[1]["job_id"] != short.job_id
    short.wait_for_step(short.steps() + 20)
    project.hpctrain("cancel", short.name)
    # Every step was done once: the notice was enough to save.
    steps = [row.step for row in read_metrics(short.folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def assert_survives_its_user(job: Job) -> None:
    project = job.project
    job.wait_for_step(15)
    project.cluster.run("scontrol", "requeue", job.job_id)
    project.cluster.wait(lambda: len(job.attempts()) == 2, 60, "the second attempt")
    assert [attempt["restarts"] for attempt in job.attempts()] == [0, 1]
    job.wait_for_step(25)
    project.hpctrain("cancel", job.name)
    assert job.status()["state"] == "cancelled"
    before = job.steps()
    again = json.loads(project.hpctrain("resubmit", job.name, "--json").stdout)
    assert again["job_id"] != job.job_id
    job.wait_until_done()
    job.assert_whole()
    # The cancelled job had saved: what was done before is not done again.
    rows = read_metrics(job.folder / "metrics.jsonl")
    assert min(row.step for row in rows if row.generation == rows[-1].generation) == before + 1


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        ("cluster.partition=nowhere", 4, "nowhere"),
        ("cluster.nodes=9", 4, "9"),
        ("cluster={kind: slurm, nodes: 2, devices_per_node: 64, device: cuda}", 4, "64"),
        ("cluster.time=soon", 2, "cluster.time"),
        ("cluster.time='3'", 2, "cluster.save_notice_s"),
        ("cluster.sbatch=[--nodes=2]", 2, "--nodes is set by hpctrain"),
    ],
)
def test_what_the_cluster_does_not_have_is_said_before_submitting(
    project: Project, override: str, code: int, text: str
) -> None:
    done = project.hpctrain("submit", "run.yaml", "--set", override, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_an_account_that_may_not_use_the_partition(project: Project) -> None:
    project.cluster.run("scontrol", "update", "partition=low", "AllowAccounts=physics")
    try:
        done = project.hpctrain("submit", "run.yaml", "--set", "cluster.account=chemistry", check=False)
    finally:
        project.cluster.run("scontrol", "update", "partition=low", "AllowAccounts=ALL")
    assert done.returncode == 4, done.stderr
    assert "cluster.account: found 'chemistry'" in done.stderr
    assert "physics" in done.stderr


def test_inside_an_allocation_the_run_starts_there(project: Project) -> None:
    words = [sys.executable, "-m", "hpctrain", "submit", "run.yaml", "-t", "topology.json", "--set", "steps=20"]
    done = subprocess.run(
        # More tasks than nodes: they are the person's, the run has an agent a node.
        ["salloc", "-p", "low", "-N3", "-n6", "-O", "--exclusive", *words],
        cwd=project.path, env=project.cluster.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "run folder " in line)
    folder = Path(line.rpartition("run folder ")[2])
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 21))
    assert rows[0].placement is not None
    assert len({item.device.partition(":")[0] for item in rows[0].placement}) > 1


def test_a_controller_that_is_away_is_said_and_the_files_speak(project: Project) -> None:
    job = project.submit("--wait", "--set", "steps=20")
    assert job.status()["state"] == "done", job.explain()
    job.assert_whole(20)
    controller = project.cluster.controller()
    controller.suspend()
    try:
        (job.folder / "events.jsonl").write_text("")  # as if the job had just begun: the controller would be asked
        told = job.status()
    finally:
        controller.resume()
    assert "the Slurm controller does not answer" in str(told["reason"])
    assert told["step"] == 20


def test_local_runs_go_to_the_background(project: Project) -> None:
    words = ["--set", "cluster.kind=local", "--set", "cluster.nodes=2", "--set", "steps=10"]
    told = json.loads(project.hpctrain("submit", "run.yaml", "--json", *words).stdout)
    job = Job(project, told["name"], Path(told["folder"]), told["job_id"])
    assert job.status()["state"] in ("queued", "unknown", "starting", "running")
    job.wait_until_done()
    job.assert_whole(10)


def test_a_dry_run_shows_the_script_and_submits_nothing(project: Project) -> None:
    before = project.cluster.run("squeue", "--noheader").stdout
    done = project.hpctrain("submit", "run.yaml", "--dry-run")
    assert "#SBATCH --partition=low" in done.stdout
    assert "provisional plan" in done.stdout or "not checked before the job starts" in done.stdout
    assert project.cluster.run("squeue", "--noheader").stdout == before
