"""`hpctrain bench plan --lab`: what it says of steps whose truth is known; the training itself is the worker's."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from hpctrain.bench.planner.lab_runs import CASES, LAB, compare, lab_record, topology_of_lab
from hpctrain.cli.bench.group import bench_command as command
from hpctrain.cli.bench.plan import show_lab_runs
from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

DEVICE = Device(id="cpu0", type="cpu", flops={"fp32": 1e12}, memory_bytes=8e9, memory_bytes_per_s=1e11, launch_s=1e-8)
FIGURES = LinkFigures(alpha_s=0.0, beta_s_per_byte=1e-12)
LOCAL = Topology(
    provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
    device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
    nodes=[Node(id=f"local{number}", addr="127.0.0.1", devices=[DEVICE]) for number in range(2)],
    fabric=Fabric(links=[Link(a="local0", b="local1", ab=FIGURES, ba=FIGURES)]),
)
LINK = (0.0, 1 / 6e6)
BY_NAME = {case.name: case for case in CASES}


def test_messages_dominate_the_steps_and_share_what_the_lab_shares() -> None:
    """On devices that take no time, a step takes what its messages take."""
    rows = [compare(case, 1.0, LOCAL, LINK) for case in CASES]
    ratios = {row.case: row.predicted_s / row.unshared_s for row in rows}
    assert ratios["1 worker a node"] == pytest.approx(1)
    assert ratios["2 workers a node"] == pytest.approx(2, rel=0.05)
    assert ratios["3 workers a node"] == pytest.approx(3, rel=0.05)
    assert 1.5 < ratios["2 of 4 nodes over an uplink"] < 2
    assert 2 < ratios["4 of 4 nodes over an uplink"] < 4
    assert 1.5 < ratios["2 all-reduces over an uplink"] < 2
    message = 8 * 128 * 128 * 4 / 6e6
    (alone,) = (row for row in rows if row.case == "1 worker a node")
    # Four activations follow each other, and then the last gradient.
    assert alone.predicted_s == pytest.approx(5 * message, rel=0.05)


def test_the_lab_is_as_the_prediction_knows_it() -> None:
    topology = topology_of_lab(BY_NAME["3 workers a node"], LOCAL, LINK, shared=True)
    assert [node.id for node in topology.nodes] == [node.name for node in LAB.nodes]
    assert {len(node.devices) for node in topology.nodes} == {3}
    for cluster, switch in zip(topology.fabric.clusters, LAB.switches, strict=True):
        assert cluster.members == switch.nodes
        # The uplink is as fast as a link, so it carries one of the members' messages at full rate.
        assert cluster.oversubscription == len(cluster.members)
        assert switch.uplink_rate == LAB.rate


def test_errors_are_of_the_measured_step() -> None:
    exact = compare(CASES[1], 1.0, LOCAL, LINK).predicted_s
    record = lab_record([compare(CASES[1], 2 * exact, LOCAL, LINK)], 6)
    (row,) = record["rows"]
    assert row["error_pct"] == pytest.approx(-50)
    assert row["unshared_error_pct"] == pytest.approx(-75, abs=1)
    assert record["error_pct"]["largest"] == pytest.approx(50)
    stream = io.StringIO()
    show_lab_runs(record, Console(file=stream, width=140))
    assert "-50.0" in stream.getvalue()
    assert "mean error 50.0 %" in stream.getvalue()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lab", "--own"], "--lab: not with --own"),
        (["--placement", "--lab"], "--lab: not with --placement"),
        (["--steps", "20"], "--steps: only with --own"),
        (["--own", "--steps", "3"], "with --own give at least 15"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], reason: str) -> None:
    done = CliRunner().invoke(command, ["plan", *words])
    assert done.exit_code != 0
    assert reason in f"{done.output} {done.exception}"
