"""What a person sees of a topology: 80 columns, what is sick first, many nodes folded, colours for a terminal only."""

import io
import itertools

import pytest
from rich.console import Console

from hpctrain.base.package_data import package_data_path
from hpctrain.records.topology.link import Latency, Link, LinkClass, LinkFigures
from hpctrain.records.topology.topology import (  # fmt: skip
    Device,
    DeviceType,
    Fabric,
    Health,
    Node,
    NodeCluster,
    Provenance,
    Reason,
    Topology,
    Verdict,
)
from hpctrain.topology.view import render


def side(rate: float, latency: float) -> LinkFigures:
    spread = Latency(min=latency, p50=latency, p95=latency)
    return LinkFigures(latency_s=spread, isolated_bytes_per_s=rate, alpha_s=latency, beta_s_per_byte=1 / rate)


def fabric_of(count: int, leaf: int) -> Topology:
    """Nodes in leaves: 10 GB/s and 2 us inside, 5 GB/s and 4 us across; the last pair has a tenth."""
    names = [f"node{number:03}" for number in range(count)]
    links = []
    for (i, a), (j, b) in itertools.combinations(enumerate(names), 2):
        near = i // leaf == j // leaf
        figures = side(10e9, 2e-6) if near else side(5e9, 4e-6)
        slow = (i, j) == (count - 2, count - 1)
        links.append(Link(a=a, b=b, ab=side(1e9, 2e-6) if slow else figures, ba=figures))
    clusters = [
        NodeCluster(id=f"leaf{start // leaf}", members=names[start : start + leaf]) for start in range(0, count, leaf)
    ]
    device = Device(id="cuda0", type="gpu", flops={"bf16": 1e14}, memory_bytes=8e10)
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp"),
        device_types={"gpu": DeviceType(kind="cuda", name="A card")},
        nodes=[Node(id=name, addr=name, devices=[device]) for name in names],
        fabric=Fabric(clusters=clusters if leaf < count else [], links=links),
    )


def shown(topology: Topology, *quantities: str, terminal: bool = False) -> str:
    console = Console(
        width=80, file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None
    )
    console.print(render(topology, quantities or ("latency", "bandwidth")))
    return console.file.getvalue()


def test_a_matrix_of_sixteen_nodes_fits_eighty_columns_and_colours_the_slow_pair() -> None:
    text = shown(fabric_of(16, 16), "bandwidth")
    coloured = shown(fabric_of(16, 16), "bandwidth", terminal=True)

    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert text.count("15 node015") == 2, "twelve columns, then the other four"
    assert "Latency" not in text
    assert "\x1b[31m 1\x1b[0m" in coloured
    assert "\x1b" not in text


def test_more_nodes_are_folded_by_cluster_with_minimum_median_and_maximum() -> None:
    text = shown(fabric_of(32, 8))

    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:1] == ["Bandwidth,"])
    rows = [line for line in lines[start:] if line[1:2] == ["leaf0"]]
    assert rows == [["0", "leaf0", "10", "5", "5", "5"]]
    last = next(i for i in range(start, len(lines)) if lines[i][1:2] == ["leaf3"])
    assert [lines[last + k][-1] for k in range(3)] == ["1", "10", "10"]
    assert "node031" not in text
    assert "node[024-031]" in text
    assert "A card" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_pairs_that_a_large_file_does_not_list_are_those_of_their_class() -> None:
    full = fabric_of(20, 20)
    network = LinkClass(id="network", alpha_s=2e-6, beta_s_per_byte=1e-10, pairs=190)
    slow = [link for link in full.fabric.links if link.ab.isolated_bytes_per_s == 1e9]
    fabric = full.fabric.model_copy(update={"links": slow, "classes": [network]})

    text = shown(full.model_copy(update={"fabric": fabric}), "bandwidth")

    assert [line.split() for line in text.splitlines()[-3:]] == [["0", "all", "nodes", "1"], ["10"], ["10"]]


def test_many_nodes_without_clusters_are_one_row() -> None:
    assert "0 all nodes" in shown(fabric_of(20, 20), "latency")


def test_what_is_sick_comes_first_with_its_reason() -> None:
    laptop = Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    slow = Health(verdict="bad", reasons=[Reason(code="SLOW_LINK", text="0.4 of its peers")])
    nodes = [*laptop.nodes[:3], laptop.nodes[3].model_copy(update={"health": slow})]

    lines = shown(laptop.model_copy(update={"nodes": nodes})).splitlines()
    fault = Verdict(status="warn", faults=[Reason(code="SLOW_LINK", text="local3: 0.4 of its peers")])
    told = shown(laptop.model_copy(update={"nodes": nodes, "verdict": fault})).splitlines()

    assert lines[0].startswith("verdict: go")
    assert lines[1].rstrip() == "  local3 bad: SLOW_LINK: 0.4 of its peers"
    assert told[1].rstrip() == "  SLOW_LINK: local3: 0.4 of its peers"
    assert "SLOW_LINK" not in told[2], "told once"


@pytest.mark.parametrize("name", ["paper-32-gpu.json", "dgx-h100-32-gpu.json"])
def test_a_file_that_nobody_measured_has_no_verdict(name: str) -> None:
    text = shown(Topology.read(package_data_path("topology", name)))

    assert text.startswith("verdict: none, nothing was measured")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
