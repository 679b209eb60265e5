"""Real node processes on this machine, and what becomes of the file when one of them dies or hangs."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from forked_python import ForkedRunner

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError
from hpctrain.launch.probe import ProbeRequest, probe_local
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Topology

pytestmark = pytest.mark.slow


class WatchedRunner(ForkedRunner):
    """Remembers the process of each node."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def start(self, argv, env=None, log=None, keep_fds=()):
        process = super().start(argv, env, log, keep_fds)
        self.pids[argv[argv.index("--node") + 1]] = process.pid
        return process


def no_process_left(runner: WatchedRunner) -> bool:
    return not any(psutil.pid_exists(pid) for pid in runner.pids.values())


def test_the_devices_of_a_cpu_node_are_measured_together_alone_and_with_messages(tmp_path: Path) -> None:
    request = ProbeRequest(device="cpu", cpu_devices=2)
    topology = probe_local(2, tmp_path, ForkedRunner(), SystemClock(), request)

    assert topology.device_ids() == ["local0:cpu0", "local0:cpu1", "local1:cpu0", "local1:cpu1"]
    for node in topology.nodes:
        if node.intra_bytes_per_s is None:  # other processes delayed the messages so much that they give no line
            why = f"{node.id}: messages between its devices were not measured: "
            assert any(note.startswith(why) for note in topology.provenance.notes)
        else:
            assert node.intra_bytes_per_s > 1e6
            assert 0 < (node.intra_alpha_s or 1e-6) < 0.1
            assert LinkCost(topology).between(node.id, node.id)[1] == 1 / node.intra_bytes_per_s
        for device in node.devices:
            assert set(device.alone.flops) == set(device.flops) == {"fp32", "bf16"}
            assert device.alone.memory_bytes_per_s > 1e8
            assert device.memory_bytes <= psutil.virtual_memory().total / 4
    shared = len(os.sched_getaffinity(0)) < 4
    assert any("several devices have the same CPU" in note for note in topology.provenance.notes) == shared
    # Messages between the nodes are measured after those within a node, by the same processes; delayed, they give no
    # line either.
    assert set(topology.fabric.classes[0].backend) <= {"gloo"}
    assert not any("over the training backend were not measured" in note for note in topology.provenance.notes)


def test_three_nodes_end_to_end(tmp_path: Path) -> None:
    runner = WatchedRunner()
    phases: list[str] = []

    topology = probe_local(3, tmp_path, runner, SystemClock(), progress=lambda phase, *_: phases.append(phase))

    assert topology == Topology.read(tmp_path / "topology.json")
    assert topology.provenance.loopback is True
    assert topology.provenance.rounds_done == topology.provenance.rounds_planned == 3
    assert len(topology.fabric.links) == 3
    for node in topology.nodes:
        assert node.iface == "lo"
        assert node.devices[0].flops["fp32"] > 1e8
        assert node.devices[0].memory_bytes > 1e8
        assert node.devices[0].memory_bytes_per_s > 1e8
        assert 0 < node.devices[0].launch_s < 1e-2
    over_gloo = [side.backend["gloo"] for link in topology.fabric.links for side in (link.ab, link.ba) if side.backend]
    assert over_gloo
    assert all(figures.alpha_s >= 0 and figures.beta_s_per_byte > 0 for figures in over_gloo)
    assert set(topology.fabric.classes[0].backend) == {"gloo"}
    assert topology.provenance.notes == []
    assert topology.verdict.exclude == []
    assert phases.index("devices") < phases.index("backend")
    assert not (tmp_path / "probe").exists()
    assert no_process_left(runner)


@pytest.mark.parametrize(
    ("how", "reason"), [(signal.SIGKILL, "its process ended"), (signal.SIGSTOP, "no answer in round")]
)
def test_a_node_that_dies_or_hangs_costs_one_slot_and_the_file_says_so(
    tmp_path: Path, how: signal.Signals, reason: str
) -> None:
    runner, clock = WatchedRunner(), SystemClock()
    done = False

    def strike(phase: str, rounds: int, planned: int) -> None:
        nonlocal done
        if phase == "links" and not done:
            done = True
            os.kill(runner.pids["local2"], how)

    # Seven nodes have 21 rounds of one pair before the full ones: time enough to strike in the middle.
    topology = probe_local(7, tmp_path, runner, clock, ProbeRequest("none"), progress=strike)

    assert topology.verdict.status == "warn"
    assert topology.verdict.exclude == ["local2"]
    assert topology.node("local2").health.verdict == "bad"
    assert reason in topology.node("local2").health.reasons[0].text
    others = {node.id for node in topology.nodes} - {"local2"}
    assert {node.health.verdict for node in topology.nodes if node.id in others} <= {"ok", "degraded"}
    measured = {frozenset((link.a, link.b)) for link in topology.fabric.links}
    assert {frozenset((a, b)) for a in others for b in others if a < b} <= measured
    assert topology.provenance.rounds_done < topology.provenance.rounds_planned
    assert no_process_left(runner)


def test_without_its_first_node_there_is_no_topology(tmp_path: Path) -> None:
    """Five nodes have several rounds to go when the first one is told; two may be done by then."""
    runner = WatchedRunner()

    def strike(phase: str, rounds: int, planned: int) -> None:
        os.kill(runner.pids["local0"], signal.SIGKILL)

    with pytest.raises(HpctrainError, match="it ended with code -9"):
        probe_local(5, tmp_path, runner, SystemClock(), ProbeRequest("none"), progress=strike)
    assert no_process_left(runner)
