"""The lab for real: Slurm's own daemons in network namespaces, real links, real faults."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]

TRANSFER = Path(__file__).with_name("lab_transfer.py")
SLURMD_PORT = "16818"

CONNECT = """
import socket, sys
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, int(sys.argv[1])), timeout=2).close()
        print(host, "yes")
    except TimeoutError:
        print(host, "silence")
"""

SPIN = """
import time
began = time.monotonic()
while time.monotonic() - began < 2:
    pass
print(time.process_time() / (time.monotonic() - began))
"""

PREEMPTED = """#!/bin/bash
trap 'echo signalled' USR1
echo "life ${SLURM_RESTART_COUNT:-0}"
while true; do sleep 0.1; done
"""

SPEC = """
nodes:
  - {name: left}
  - {name: right, cpu_share: 0.5}
switches:
  - {nodes: right, uplink_rate: 60mbit}
"""


def payload_bits_per_s(cluster, receiver: str, sender: str) -> float:
    done = cluster.run(
        "srun", f"--nodelist={receiver},{sender}", "-N2", "--ntasks-per-node=1",
        sys.executable, str(TRANSFER), receiver, "17001",
    )  # fmt: skip
    return float(done.stdout)


def agrees(cluster, receiver: str, sender: str, low: float, high: float) -> bool:
    """Whether a transfer has so many bits/s, at the first try that a busy machine lets through undisturbed."""
    measured = []
    while len(measured) < 6 and not any(low < rate < high for rate in measured):
        measured.append(payload_bits_per_s(cluster, receiver, sender))
    print(f"{sender} to {receiver}, bits/s: {measured}")
    return low < measured[-1] < high


def reaches(cluster, source: str, *targets: str) -> dict[str, str]:
    done = cluster.run("srun", "-w", source, "-N1", sys.executable, "-c", CONNECT, SLURMD_PORT, *targets)
    return dict(line.split() for line in done.stdout.splitlines())


def lines_of(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def traces() -> dict[str, list[str]]:
    """Everything on this machine that bears the lab's name."""
    return {
        "namespaces": [line for line in lines_of("ip", "netns", "list") if line.startswith("hpct")],
        "interfaces": [line for line in lines_of("ip", "-o", "link") if ": hpct" in line],
        "hosts": [line for line in Path("/etc/hosts").read_text().splitlines() if "hpctrain-lab" in line],
        "groups": [str(path) for path in Path("/sys/fs/cgroup").glob("**/hpctrain-lab")],
        "processes": [
            " ".join(argv)
            for argv in (_argv(process) for process in psutil.process_iter())
            if any("hpctrain-lab-tests" in word for word in argv)
        ],
        "folders": [str(path) for path in Path("/run").glob("hpctrain-lab-tests*")],
    }


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


NOTHING: dict[str, list[str]] = {
    key: [] for key in ("namespaces", "interfaces", "hosts", "groups", "processes", "folders")
}


def test_four_nodes_with_names_and_addresses_of_their_own(cluster):
    done = cluster.run("srun", "-N4", "sh", "-c", "echo $(hostname) $(hostname -I)")
    assert sorted(done.stdout.splitlines()) == [f"node{at} 198.18.7.{10 + at}" for at in range(4)]
    found = json.loads(cluster.lab("status", "--json").stdout)
    assert [(node["name"], node["state"], node["link_up"]) for node in found["nodes"]] == [
        (f"node{at}", "idle", True) for at in range(4)
    ]
    assert found["nodes"][0]["out_bits_per_s"] == 1e9


@pytest.mark.slurms("own", "next")
def test_a_task_takes_its_nodes_share_of_the_cores_unless_it_is_told_otherwise(cluster):
    share = str(max(1, len(os.sched_getaffinity(0)) // len(cluster.nodes)))
    for told, expected in (("-u", share), ("OMP_NUM_THREADS=3", "3")):
        words = [told, "OMP_NUM_THREADS"] if told == "-u" else [told]
        asked = cluster.run("env", *words, "srun", "-N4", "sh", "-c", "echo $OMP_NUM_THREADS")
        assert asked.stdout.split() == 4 * [expected]


def test_a_link_has_the_rate_it_is_given_in_each_direction(cluster):
    cluster.lab("shape", "node1", "--rate", "100mbit", "--direction", "out")
    cluster.lab("shape", "node1", "--rate", "40mbit", "--direction", "in")
    assert agrees(cluster, "node0", "node1", 85e6, 115e6)
    assert agrees(cluster, "node1", "node0", 34e6, 46e6)
    cluster.lab("heal", "node1")
    assert agrees(cluster, "node1", "node0", 60e6, math.inf)


def test_a_cut_pair_hears_nothing_of_each_other_and_everything_of_the_rest(cluster):
    cluster.lab("cut", "node0", "node1")
    assert reaches(cluster, "node0", "node1", "node2") == {"node1": "silence", "node2": "yes"}
    assert reaches(cluster, "node1", "node0", "node3") == {"node0": "silence", "node3": "yes"}
    # Slurm sees nothing wrong with either; the steps above may still be ending there.
    cluster.wait(lambda: cluster.node_state("node[0-1]") == "idle", 60, "both nodes are idle")
    cluster.lab("heal", "node1")
    assert reaches(cluster, "node0", "node1") == {"node1": "yes"}


def test_killed_and_silent_nodes_go_down_and_come_back(cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsleep 300\n")
    job = cluster.run("sbatch", "--parsable", "--requeue", "-w", "node3", "-o", "/dev/null", str(script)).stdout.strip()
    cluster.wait(lambda: cluster.job(job)["JobState"] == "RUNNING", 20, "the job runs")
    assert "node3: " in cluster.lab("kill", "node3").stderr
    cluster.lab("kill", "--silent", "node2")
    status = json.loads(cluster.lab("status", "--json").stdout)["nodes"]
    assert [node["processes"] for node in status[2:]] == [0, 0]
    assert [node["link_up"] for node in status] == [True, True, False, True]
    cluster.wait(lambda: cluster.node_state("node[2-3]") == "down*", 60, "Slurm sets both nodes down")
    assert cluster.job(job)["Restarts"] == "1"
    cluster.lab("heal", "node[2-3]")
    assert len(cluster.run("srun", "-p", "high", "-w", "node[2-3]", "-N2", "hostname").stdout.split()) == 2


def test_a_hung_node_stops_and_goes_on(cluster):
    ticking = "import time\nwhile True: print(time.time(), flush=True); time.sleep(0.05)"
    log = cluster.folder / "ticks"
    job = cluster.start("srun", "-w", "node1", "-N1", sys.executable, "-c", ticking, log=log)
    try:
        cluster.wait(lambda: log.exists() and log.stat().st_size > 0, 20, "the job ticks")
        cluster.lab("kill", "--hang", "node1")
        size = log.stat().st_size
        time.sleep(1)
        assert log.stat().st_size == size
        assert reaches(cluster, "node0", "node1") == {"node1": "yes"}  # its kernel still answers
        cluster.lab("heal", "node1")
        cluster.wait(lambda: log.stat().st_size > size, 10, "the job goes on")
    finally:
        job.kill()
        job.wait()


def test_a_low_job_is_signalled_requeued_and_started_again(cluster, tmp_path):
    script, output = tmp_path / "low.sh", tmp_path / "low.out"
    script.write_text(PREEMPTED)
    submit = ("sbatch", "--parsable", "-p", "low", "-N4", "--exclusive", "--requeue", "--signal=B:USR1@30")
    job = cluster.run(*submit, "--open-mode=append", "-o", str(output), str(script)).stdout.strip()
    cluster.wait(lambda: output.exists() and "life 0" in output.read_text(), 20, "the low job runs")
    assert len(cluster.run("srun", "-p", "high", "-N4", "--exclusive", "hostname").stdout.split()) == 4
    assert output.read_text().split("\n")[:2] == ["life 0", "signalled"]
    assert cluster.job(job)["Restarts"] == "1"
    cluster.wait(lambda: "life 1" in output.read_text(), 45, "the low job starts again")


def test_a_second_up_is_refused_and_changes_nothing(cluster):
    done = cluster.lab("up", "--nodes", "2", check=False)
    assert done.returncode == 2
    assert f"a lab is up in {cluster.folder}" in done.stderr
    assert cluster.node_state("node[0-3]") == "idle"


def test_switches_and_cpu_shares_and_down_leaves_nothing(lab, tmp_path):
    spec = tmp_path / "lab.yaml"
    spec.write_text(SPEC)
    done = lab.lab("up", str(spec), "--replace")
    assert done.stdout == f"export SLURM_CONF={lab.folder}/slurm.conf\n"
    assert agrees(lab, "left", "right", 51e6, 69e6)
    share = float(lab.run("srun", "-w", "right", "-N1", sys.executable, "-c", SPIN).stdout)
    assert share < 0.6
    assert all(traces().values())
    lab.lab("down")
    assert traces() == NOTHING
    assert lab.lab("down").stderr == "nothing to take down\n"


@pytest.mark.parametrize("moment", ["/run/netns/hpct-node1", "{folder}/log/slurmctld.out"])
def test_an_up_that_was_killed_is_cleared_by_the_next(lab, moment):
    lab.lab("down")
    there = Path(moment.format(folder=lab.folder))
    process = lab.start(sys.executable, "-m", "hpctrain", "lab", "up", "--nodes", "4")
    while not there.exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not lab.is_up()
    done = lab.lab("up", "--nodes", "4")
    assert "clearing what an earlier lab left" in done.stderr
    assert len(lab.run("srun", "-N4", "hostname").stdout.split()) == 4
    lab.lab("down")
    assert traces() == NOTHING
