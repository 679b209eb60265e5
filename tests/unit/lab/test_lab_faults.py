"""Faults and their repair: what is done to which process and to which end of which link."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.base.process import CommandResult
from hpctrain.lab.faults import cut, heal, kill_nodes, shape
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import ProcessTable
from hpctrain.lab.spec import LabSpec
from hpctrain.lab.status import parse_jobs, parse_nodes, read_lab_status

STOP, CONT, KILL = (str(int(number)) for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL))


@pytest.fixture
def layout(tmp_path) -> LabLayout:
    return LabLayout(tmp_path / "lab", LabSpec.from_json({"nodes": 3, "rate": "200mbit"}))


@pytest.fixture
def nodes(desk, layout):
    """Each node runs its slurmd and a job; process ids 100, 101, 110, 111, …"""
    for index, name in enumerate(layout.names):
        first = 100 + 10 * index
        desk.namespaces[f"hpct-{name}"] = {first, first + 1, first + 2}
        desk.table[first] = ("slurmd", "-D", "-f", str(layout.slurm_conf), "-N", name)
        desk.table[first + 1] = ("slurmstepd: [7.0]",)
    desk.table[50] = ("bash",)
    return desk


class Slurm:
    """Answers scontrol; a node is as `states` says."""

    def __init__(self, layout: LabLayout, clock) -> None:
        self.layout, self.clock = layout, clock
        self.states = dict.fromkeys(layout.names, "IDLE")
        self.started_s = dict.fromkeys(layout.names, 500)

    def __call__(self, argv):
        if "scontrol" not in argv or "show" not in argv:
            return None
        lines = [f"NodeName={n} State={self.states[n]} SlurmdStartTime={self.started_s[n]}" for n in self.states]
        return CommandResult(argv, 0, "\n".join(lines), "")


@pytest.fixture
def slurm(desk, layout, machine) -> Slurm:
    slurm = Slurm(layout, machine.clock)
    desk.answers.append(slurm)
    return slurm


def test_kill_ends_every_process_of_the_node_and_no_other(machine, nodes, layout):
    assert kill_nodes(machine, layout, ["node1"]) == {"node1": 2}
    assert set(nodes.table) == {100, 101, 120, 121, 50}
    assert not nodes.ran("ip", "-n")
    # None of them sees another one die.
    sent = nodes.ran("signal")
    numbers = [number for _, _, number in sent]
    assert numbers.index(KILL) > max(at for at, number in enumerate(numbers) if number == STOP)
    # A parent's death would wake its stopped children: they die first.
    assert [pid for _, pid, number in sent if number == KILL][:2] == ["111", "110"]


def test_children_come_before_their_parents():
    with subprocess.Popen(["sleep", "60"]) as child:
        gone = subprocess.Popen(["true"])
        gone.wait()
        family = [os.getppid(), os.getpid(), child.pid, gone.pid]
        assert ProcessTable().newest_first(family) == [child.pid, os.getpid(), os.getppid()]
        child.kill()


def test_kill_goes_on_until_nothing_new_starts(machine, nodes, layout):
    def fork_once(pid: int, number: int) -> None:
        if pid == 111:
            nodes.table[112] = ("late child",)

    nodes.on_signal = fork_once
    assert kill_nodes(machine, layout, ["node1"]) == {"node1": 3}
    assert 112 not in nodes.table


def test_a_process_that_does_not_die_is_told(machine, nodes, layout):
    nodes.on_signal = lambda pid, number: nodes.table.update({pid: ("unkillable",)})
    with pytest.raises(CommandError, match="processes 110, 111 do not end in spite of SIGKILL"):
        kill_nodes(machine, layout, ["node1"])


def test_silent_takes_the_link_down_before_anything_else(machine, nodes, layout):
    kill_nodes(machine, layout, ["node2"], "silent")
    assert nodes.log[0] == ("ip", "-n", "hpctfabric", "link", "set", "hpctv2", "down")
    assert ("signal", "120", KILL) in nodes.log


def test_hang_stops_and_ends_nothing(machine, nodes, layout):
    assert kill_nodes(machine, layout, ["node0"], "hang") == {"node0": 2}
    assert set(nodes.ran("signal")) == {("signal", "100", STOP), ("signal", "101", STOP)}
    assert 100 in nodes.table


def test_cut_takes_two_different_nodes_and_happens_once(machine, desk, layout):
    with pytest.raises(InputError, match="cut node0 node0: two different nodes are needed"):
        cut(machine, layout, "node0", "node0")
    cut(machine, layout, "node0", "node1")
    assert len(desk.ran("tc", "-n", "hpctfabric", "filter", "add")) == 2
    desk.answers.append(lambda argv: CommandResult(argv, 0, '[{"pref":1001}]', "") if "-j" in argv else None)
    cut(machine, layout, "node0", "node1")
    assert len(desk.ran("tc", "-n", "hpctfabric", "filter", "add")) == 2


def test_shape_changes_the_asked_direction_only(machine, desk, layout):
    shape(machine, layout, ["node1"], "10mbit", ["in"])
    assert {argv[2] for argv in desk.log} == {"hpctfabric"}
    shape(machine, layout, ["node1"], None)
    assert [argv[2] for argv in desk.log[2:]] == ["hpctfabric", "hpctfabric", "hpct-node1", "hpct-node1"]
    assert all("100gbit" in argv for argv in desk.log[2:] if argv[3] == "class")


def test_heal_undoes_every_fault_of_a_dead_node(machine, nodes, layout, slurm):
    kill_nodes(machine, layout, ["node1"], "silent")
    slurm.states["node1"] = "DOWN+NOT_RESPONDING"
    nodes.answers.append(lambda argv: CommandResult(argv, 0, '[{"pref":1002}]', "") if "filter" in argv else None)
    start = nodes.start

    def start_and_register(argv, env=None, log=None, keep_fds=()):
        slurm.states["node1"] = "IDLE"
        slurm.started_s["node1"] = int(machine.clock.wall())
        return start(argv, env, log, keep_fds)

    nodes.start = start_and_register
    nodes.log.clear()
    assert heal(machine, layout, ["node1"])["node1"].text == "idle"
    assert ("tc", "-n", "hpctfabric", "filter", "del", "dev", "hpctv1", "parent", "1:", "pref", "1002") in nodes.log
    assert ("tc", "-n", "hpctfabric", "filter", "del", "dev", "hpctv2", "parent", "1:", "pref", "1001") in nodes.log
    assert ("ip", "-n", "hpctfabric", "link", "set", "hpctv1", "up") in nodes.log
    assert [argv[2] for argv in nodes.log if "200mbit" in argv] == ["hpctfabric", "hpct-node1"]
    assert [argv[-1] for argv in nodes.ran("start")] == ["node1"]


def test_heal_lets_a_healthy_node_run_on(machine, nodes, layout, slurm):
    heal(machine, layout, ["node0"])
    assert nodes.ran("start") == []
    assert set(nodes.ran("signal")) == {("signal", "100", CONT), ("signal", "101", CONT)}


def test_a_hung_node_that_slurm_gave_up_gets_a_new_slurmd_and_keeps_its_steps(machine, nodes, layout, slurm):
    slurm.states["node0"] = "DOWN*"
    with pytest.raises(CommandError, match=r"not healed within 60 s: Slurm says \{'node0': 'down\*'\}"):
        heal(machine, layout, ["node0"])
    assert 100 not in nodes.table
    assert 101 in nodes.table
    assert [argv[-1] for argv in nodes.ran("start")] == ["node0"]


def test_what_slurm_said_before_the_new_slurmd_registered_does_not_count(machine, nodes, layout, slurm):
    kill_nodes(machine, layout, ["node0"])  # and Slurm has not noticed yet: it still says IDLE
    with pytest.raises(CommandError, match="not healed within 60 s"):
        heal(machine, layout, ["node0"])


def test_a_drained_node_is_resumed(machine, nodes, layout, slurm):
    slurm.states["node2"] = "IDLE+DRAIN"
    with pytest.raises(CommandError):
        heal(machine, layout, ["node2"])
    assert any(argv[-3:] == ("update", "NodeName=node2", "State=RESUME") for argv in nodes.log)


def test_without_a_controller_nothing_is_healed(machine, desk, layout):
    with pytest.raises(RefusedError, match="the controller does not answer; see "):
        heal(machine, layout, ["node0"])


@pytest.mark.parametrize(
    ("state", "text", "healthy"),
    [
        ("IDLE", "idle", True),
        ("ALLOCATED", "allocated", True),
        ("MIXED+COMPLETING", "mixed+completing", True),
        ("IDLE*", "idle*", False),
        ("DOWN+NOT_RESPONDING", "down*", False),
        ("DOWN*+DRAIN", "down+drain*", False),
        ("IDLE+DRAIN", "idle+drain", False),
        ("UNKNOWN", "unknown", False),
    ],
)
def test_states_of_nodes(state, text, healthy):
    found = parse_nodes(f"NodeName=a Arch=x86_64 CPUTot=2 State={state} SlurmdStartTime=1790000000 OS=Linux 6.1\n")["a"]
    assert (found.text, found.healthy, found.started_s) == (text, healthy, 1790000000.0)


def test_a_node_that_never_registered_has_no_start():
    found = parse_nodes("NodeName=a State=DOWN* SlurmdStartTime=None\n\nnonsense\n")
    assert found["a"].started_s is None
    assert list(found) == ["a"]


def test_jobs_as_squeue_prints_them():
    assert parse_jobs("7|train|low|RUNNING|node[0-1]|None\nslurm_load_jobs error\n") == [
        {"id": "7", "name": "train", "partition": "low", "state": "RUNNING", "nodes": "node[0-1]", "reason": "None"}
    ]


def test_status_asks_the_kernel_and_slurm(machine, nodes, layout, slurm):
    nodes.table[60] = ("slurmctld", "-D", "-f", str(layout.slurm_conf))

    def kernel(argv):
        if argv[-2:] == ("link", "show"):
            return CommandResult(argv, 0, '[{"ifname":"hpctv0","flags":["UP"]},{"ifname":"hpctv1","flags":[]}]', "")
        if "class" in argv:
            rate = "50Mbit" if argv[2] == "hpct-node0" else "200Mbit"
            return CommandResult(argv, 0, f"class htb 1:1 root leaf 10: prio 0 rate {rate} ceil {rate}\n", "")
        if "squeue" in argv:
            return CommandResult(argv, 0, "7|train|low|PENDING||Resources\n", "")
        return CommandResult(argv, 0, '[{"pref":1002}]', "") if "hpctv0" in argv else None

    nodes.answers.append(kernel)
    found = read_lab_status(machine, layout).to_json()
    assert found["nodes"][0] == {
        "name": "node0", "address": "198.18.7.10", "switch": "hpctbr", "state": "idle", "processes": 2,
        "link_up": True, "out_bits_per_s": 5e7, "in_bits_per_s": 2e8, "cut_from": ["node2"],
    }  # fmt: skip
    assert found["nodes"][1]["link_up"] is False
    assert found["jobs"][0]["reason"] == "Resources"
    assert found["controller"] is True


def test_status_without_a_controller_still_shows_the_network(machine, nodes, layout):
    found = read_lab_status(machine, layout).to_json()
    assert found["controller"] is False
    assert "state" not in found["nodes"][0]
    assert found["jobs"] == []
