"""Nodes that share a machine, as in a lab, are judged less finely; a CPU quota is told from cpu.stat."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hpctrain.probe.analyse.assemble import SHARED_NOTE, assemble
from hpctrain.probe.faults.node_faults import CPU_QUOTA, device_faults
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import JoinedNode, PairResult, ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings, with_shared_nodes
from hpctrain.probe.system.host import is_held_by_quota, quota_periods
from hpctrain.records.topology.evidence import HostFacts
from hpctrain.records.topology.link import Latency
from hpctrain.records.topology.topology import Device, DeviceType, Node, Topology


def measured(rate: float, latency: float, machines: list[str], settings: ProbeSettings) -> Topology:
    """The topology in which n2 has that share of the others' bandwidth, and so many times their latency."""
    names = [f"n{index}" for index in range(4)]
    made = ProbeOutcome(names)
    for name, machine in zip(names, machines, strict=True):
        made.joined[name] = JoinedNode(
            addr="10.0.0.1", port=1, iface="eth0", host=name, facts=HostFacts(boot_id=machine)
        )
    for alone, (a, b) in itertools.product((False, True), itertools.combinations(names, 2)):
        share, times = (rate, latency) if "n2" in (a, b) else (1.0, 1.0)
        low, middle = 5e-5 * times, 6e-5 * times
        end = PairFigures(latency=Latency(min=low, p50=middle, p95=2 * middle), bytes_per_s=1e8 * share, n=8)
        result = PairResult(a, b, alone, 2, end, end)
        made.add([result], ProbeSettings().bulk_bytes)
        if alone:
            made.retests += [result] * 3
    return assemble(made, settings, wall=0.0)


def codes(rate: float, latency: float, machines: list[str]) -> list[str]:
    return [fault.code for fault in measured(rate, latency, machines, ProbeSettings(device="none")).verdict.faults]


def test_a_neighbours_load_excludes_no_node_of_which_the_job_has_a_part() -> None:
    settings, machines = ProbeSettings(device="none"), ["one", "two", "three", "four"]
    for rate, latency in ((0.3, 1.0), (1.0, 20.0)):
        whole = measured(rate, latency, machines, settings)
        part = measured(rate, latency, machines, with_shared_nodes(settings))
        assert (whole.verdict.exclude, part.verdict.exclude) == (["n2"], [])
        assert part.verdict.status == "warn"
        assert [fault.code for fault in part.verdict.faults] == ["SLOW_NODE"]
        assert (whole.provenance.shared, part.provenance.shared) == (False, True)
        assert (whole.provenance.notes, part.provenance.notes) == ([], [SHARED_NOTE])


@pytest.mark.parametrize(
    ("rate", "latency", "apart", "together"),
    [
        (0.75, 1.0, ["SLOW_NODE"], []),
        (0.65, 1.0, ["SLOW_NODE"], ["SLOW_NODE"]),
        (1.0, 2.0, ["SLOW_NODE"], []),
    ],
)
def test_what_the_machine_shares_is_no_fault_of_a_node(
    rate: float, latency: float, apart: list[str], together: list[str]
) -> None:
    assert codes(rate, latency, ["one", "two", "three", "four"]) == apart
    assert codes(rate, latency, ["one"] * 4) == together


def group(root: Path, name: str, periods: int, held: int) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text(f"nr_periods {periods}\nnr_throttled {held}\nthrottled_usec 5\n")


@pytest.mark.parametrize(("line", "root"), [("3:cpu,cpuacct:/slurm/job/step", "cpu"), ("0::/slurm/job/step", "")])
def test_the_quotas_of_the_group_and_of_those_above_are_read(tmp_path: Path, line: str, root: str) -> None:
    (tmp_path / "cgroup").write_text(f"7:memory:/elsewhere\n{line}\n")
    for name, told in {"slurm/job/step": (0, 0), "slurm/job": (40, 9), "slurm": (0, 0)}.items():
        group(tmp_path / root, name, *told)

    assert quota_periods(tmp_path, tmp_path) == {tmp_path / root / "slurm/job": (40, 9)}


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_periods(tmp_path, tmp_path) == {}
    (tmp_path / "cgroup").write_text("1:cpu:/\n")
    assert quota_periods(tmp_path, tmp_path) == {}


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        ({}, {}, False),
        ({}, {Path("a"): (8, 2)}, True),
        ({}, {Path("a"): (8, 1)}, False),
        ({Path("a"): (8, 8)}, {Path("a"): (16, 9)}, False),
        ({Path("a"): (8, 0), Path("b"): (8, 0)}, {Path("a"): (16, 0), Path("b"): (16, 8)}, True),
        ({Path("a"): (8, 8)}, {Path("a"): (8, 8)}, False),
    ],
)
def test_a_quota_that_stopped_a_quarter_of_the_periods_held_the_group(before: dict, after: dict, held: bool) -> None:
    assert is_held_by_quota(before, after) is held


@pytest.mark.parametrize(("count", "named"), [(1, ["n0"]), (2, []), (4, [])])
def test_a_quota_is_a_fault_of_the_few_that_it_stops(count: int, named: list[str]) -> None:
    nodes = []
    for index in range(4):
        device = Device(id="cpu0", type="cpu", throttle_reasons=[CPU_QUOTA] if index < count else [])
        nodes.append(Node(id=f"n{index}", addr="10.0.0.1", devices=[device]))

    found = device_faults(nodes, {"cpu": DeviceType(kind="cpu", name="CPU")})

    assert [(fault.node, fault.reason.code) for fault in found] == [(name, "THROTTLED") for name in named]
