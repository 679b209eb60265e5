"""Topologies in other tools' formats: what is written is what the tool reads, and what is missing is refused."""

import csv
import io
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.records.topology.link import Latency, Link, LinkClass, LinkFigures
from hpctrain.records.topology.topology import (  # fmt: skip
    Device,
    DeviceType,
    Fabric,
    Node,
    NodeCluster,
    Provenance,
    Topology,
)
from hpctrain.topology.formats.other_planners import metis_files, network_yml
from hpctrain.topology.formats.pairs_csv import COLUMNS, pairs_csv
from hpctrain.topology.formats.slurm import block_yaml, clusters_of_conf, clusters_of_yaml, tree_conf

CLASS = LinkClass(id="network", alpha_s=5e-6, beta_s_per_byte=1e-9, pairs=1)


def topology(
    names: list[str], clusters: list[NodeCluster] | None = None, links: list[Link] | None = None,
    devices: int = 1, classes: tuple[LinkClass, ...] = (CLASS,), **fields: object,
) -> Topology:  # fmt: skip
    each = [Device(id=f"cpu{i}", type="cpu", memory_bytes=5.9 * 2**30) for i in range(devices)]
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr=f"10.0.0.{i}", devices=each, **fields) for i, name in enumerate(names)],
        fabric=Fabric(clusters=clusters or [], links=links or [], classes=list(classes)),
    )


@st.composite
def switch_trees(draw: st.DrawFn) -> tuple[list[str], list[NodeCluster]]:
    """Nodes and a whole tree of switches of one to three levels over them, with one root."""
    widths = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    leaves = 1
    for width in widths:
        leaves *= width
    sizes = draw(st.lists(st.integers(1, 5), min_size=leaves, max_size=leaves))
    names = [f"n{number}" for number in range(sum(sizes))]
    taken = iter(draw(st.permutations(names)))
    level = [NodeCluster(id=f"leaf{i}", members=[next(taken) for _ in range(size)]) for i, size in enumerate(sizes)]
    clusters: list[NodeCluster] = []
    for height, width in enumerate(reversed(widths), 2):
        above = []
        for start in range(0, len(level), width):
            below, name = level[start : start + width], f"l{height}s{start // width}"
            members = [member for cluster in below for member in cluster.members]
            above.append(NodeCluster(id=name, level=height, members=members))
            clusters += [cluster.model_copy(update={"parent": name}) for cluster in below]
        level = above
    return names, [*clusters, *level]


def shape(clusters: list[NodeCluster]) -> set[tuple[str, int, str | None, frozenset[str]]]:
    return {(cluster.id, cluster.level, cluster.parent, frozenset(cluster.members)) for cluster in clusters}


@given(switch_trees())
@settings(max_examples=60, deadline=None)
def test_slurm_switches_come_back_as_they_were(tree: tuple[list[str], list[NodeCluster]]) -> None:
    names, clusters = tree

    back = clusters_of_conf(tree_conf(topology(names, clusters)), "topology.conf")

    assert shape(back) == shape(clusters)
    assert {cluster.source for cluster in back} == {"slurm"}


@given(switch_trees())
@settings(max_examples=30, deadline=None)
def test_slurm_blocks_are_the_clusters_next_to_the_nodes(tree: tuple[list[str], list[NodeCluster]]) -> None:
    names, clusters = tree

    text = block_yaml(topology(names, clusters))

    inner = {cluster.parent for cluster in clusters}
    leaves = {(c.id, frozenset(c.members)) for c in clusters if c.id not in inner}
    assert {(c.id, frozenset(c.members)) for c in clusters_of_yaml(text, "topology.yaml")} == leaves
    sizes = [len(members) for _, members in leaves]
    assert yaml.safe_load(text)[0]["block"]["block_sizes"] == [min(sizes)]


def test_nodes_without_a_cluster_and_trees_without_a_root_are_connected() -> None:
    clusters = [NodeCluster(id="a", members=["n1", "n2"]), NodeCluster(id="b", members=["n3"])]

    text = tree_conf(topology(["n1", "n2", "n3", "n4", "n5"], clusters))

    assert text.splitlines()[1:] == [
        "SwitchName=a Nodes=n[1-2]",
        "SwitchName=b Nodes=n3",
        "SwitchName=loose Nodes=n[4-5]",
        "SwitchName=fabric Switches=a,b,loose",
    ]


def test_a_parent_that_has_no_cluster_of_its_own_is_a_switch() -> None:
    clusters = [NodeCluster(id="a", parent="top", members=["n1"]), NodeCluster(id="b", parent="top", members=["n2"])]

    assert tree_conf(topology(["n1", "n2"], clusters)).splitlines()[-1] == "SwitchName=top Switches=a,b"


def test_a_file_without_clusters_is_one_switch() -> None:
    assert tree_conf(topology(["r1-n1", "r1-n2", "r2-n1"])).splitlines()[1:] == ["SwitchName=all Nodes=r1-n[1-2],r2-n1"]


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        ([NodeCluster(id="a b", members=["n1"])], "Slurm cannot read the name 'a b'"),
        (
            [NodeCluster(id="a", members=["n1"]), NodeCluster(id="b", members=["n1"])],
            "'n1' is in 'a' and in 'b'; a node hangs on one switch",
        ),
        (
            [NodeCluster(id="a", parent="b", members=["n1"]), NodeCluster(id="b", parent="a", members=["n1"])],
            "a, b lie in each other",
        ),
    ],
)
def test_clusters_that_are_no_tree_of_switches_are_refused(clusters: list[NodeCluster], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tree_conf(topology(["n1", "n2"], clusters))


seconds = st.floats(1e-9, 10, allow_nan=False)
rates = st.floats(1, 1e12)


@st.composite
def figures(draw: st.DrawFn) -> LinkFigures:
    return LinkFigures(
        latency_s=draw(st.none() | st.builds(Latency, min=seconds, p50=seconds, p95=seconds)),
        isolated_bytes_per_s=draw(st.none() | rates),
        loaded_bytes_per_s=draw(st.none() | rates),
        alpha_s=draw(st.none() | seconds),
        beta_s_per_byte=draw(st.none() | st.floats(1e-12, 1)),
        n=draw(st.none() | st.integers(1, 99)),
        inferred=draw(st.booleans()),
    )


@given(ab=figures(), ba=figures())
@settings(max_examples=60, deadline=None)
def test_csv_holds_every_figure_of_a_link_in_both_directions(ab: LinkFigures, ba: LinkFigures) -> None:
    link = Link(a="n1", b="n2", **{"class": "network"}, ab=ab, ba=ba)

    rows = list(csv.DictReader(io.StringIO(pairs_csv(topology(["n1", "n2"], links=[link], classes=())))))

    assert [(row["source"], row["target"]) for row in rows] == [("n1", "n2"), ("n2", "n1")]
    for row, side in zip(rows, (ab, ba), strict=True):
        assert tuple(row) == COLUMNS
        told = {key: float(text) for key, text in row.items() if key.endswith(("_s", "_per_byte")) and text}
        expected = {
            "latency_min_s": side.latency_s and side.latency_s.min,
            "latency_p50_s": side.latency_s and side.latency_s.p50,
            "latency_p95_s": side.latency_s and side.latency_s.p95,
            "isolated_bytes_per_s": side.isolated_bytes_per_s,
            "loaded_bytes_per_s": side.loaded_bytes_per_s,
            "alpha_s": side.alpha_s,
            "beta_s_per_byte": side.beta_s_per_byte,
        }
        assert told == {key: value for key, value in expected.items() if value is not None}
        assert (row["n"], row["inferred"]) == ("" if side.n is None else str(side.n), str(side.inferred).lower())


def test_csv_takes_a_pair_that_is_not_listed_from_its_class_and_says_so() -> None:
    known = list(csv.DictReader(io.StringIO(pairs_csv(topology(["n1", "n2"])))))
    unknown = list(csv.DictReader(io.StringIO(pairs_csv(topology(["n1", "n2"], classes=())))))

    assert [(row["alpha_s"], row["beta_s_per_byte"], row["inferred"]) for row in known] == [
        ("5e-06", "1e-09", "true")
    ] * 2
    assert [set(list(row.values())[2:]) for row in unknown] == [{""}, {""}]


def test_metis_gets_whole_gib_and_mib_per_ms() -> None:
    files = metis_files(topology(["n1", "n2"], devices=2, intra_bytes_per_s=4 * 2**20 * 1000))

    assert files["hostfile"] == "10.0.0.0 slots=2\n10.0.0.1 slots=2\n"
    entry = json.loads(files["clusterfile.json"])["10.0.0.1"]
    assert entry == {"instance_type": "cpu", "inter_bandwidth": 0.954, "intra_bandwidth": 4.0, "memory": 5}


def test_metis_gets_node_names_where_addresses_are_shared() -> None:
    shared = topology(["n1", "n2"])
    nodes = [node.model_copy(update={"addr": "127.0.0.1"}) for node in shared.nodes]

    assert metis_files(shared.model_copy(update={"nodes": nodes}))["hostfile"] == "n1 slots=1\nn2 slots=1\n"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (topology(["n1", "n2"], devices=10), "found 10 devices; Metis reads up to 9"),
        (topology(["n1", "n2"], devices=2), "intra_bytes_per_s is absent"),
        (topology(["n1", "n2"], classes=()), "no alpha_s and beta_s_per_byte for n1-n2"),
        (topology(["n1", "n2"], devices=0), "found no device; Metis describes a node by one device type"),
    ],
)
def test_what_metis_needs_and_the_file_has_not_is_refused(made: Topology, words: str) -> None:
    with pytest.raises(InputError, match=words):
        metis_files(made)


def test_astra_sim_gets_a_dimension_within_and_one_among_nodes() -> None:
    text = network_yml(topology(["n1", "n2", "n3"], devices=2, intra_bytes_per_s=2 * 2**30))

    assert yaml.safe_load(text) == {
        "topology": ["Switch", "Switch"],
        "npus_count": [2, 3],
        "bandwidth": [2, 0.931323],
        "latency": [5000, 5000],
    }


def test_astra_sim_takes_no_mixed_nodes_and_no_single_device() -> None:
    mixed = topology(["n1", "n2"], devices=2)
    nodes = [mixed.nodes[0], mixed.nodes[1].model_copy(update={"devices": mixed.nodes[1].devices[:1]})]

    with pytest.raises(InputError, match="found 1 and 2 devices a node"):
        network_yml(mixed.model_copy(update={"nodes": nodes}))
    with pytest.raises(InputError, match="one node with one device"):
        network_yml(topology(["n1"]))
