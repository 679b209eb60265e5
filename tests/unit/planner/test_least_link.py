"""The least cost of any link, which bounds every message, against all pairs one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.records.topology.link import BackendFigures, LinkClass
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Fabric, Node, NodeCluster, Provenance, Topology

NODES = [f"n{number}" for number in range(6)]


def pairs_topology(backend):
    rng = np.random.default_rng(3)
    matrix = PairMatrix(NODES)
    for a, b in itertools.permutations(range(6), 2):
        matrix["alpha_s"][a, b], matrix["beta_s_per_byte"][a, b] = rng.uniform(1, 9, 2) * (1e-6, 1e-10)
    # The fastest pairs of all lie within a rack, whose messages the backend slows down the most.
    matrix["alpha_s"][0, 1] = matrix["beta_s_per_byte"][0, 1] = 1e-12
    over = {"gloo": BackendFigures(alpha_s=9e-3, beta_s_per_byte=9e-7)} if backend else {}
    classes = [
        LinkClass(id="rack", alpha_s=1e-6, beta_s_per_byte=1e-10, pairs=12, level=1, backend=over),
        LinkClass(id="room", alpha_s=5e-6, beta_s_per_byte=5e-10, pairs=18, level=0),
    ]
    clusters = [NodeCluster(id="r0", level=1, members=NODES[:3]), NodeCluster(id="r1", level=1, members=NODES[3:])]
    bare = Topology(
        provenance=Provenance(version="0", created="1970-01-01T00:00:00Z", transport="tcp"),
        device_types={},
        nodes=[Node(id=name, addr="", devices=[]) for name in NODES],
        fabric=Fabric(classes=classes, clusters=clusters),
    )
    return bare.with_pairs(matrix)


@pytest.mark.parametrize("backend", [False, True])
def test_the_least_cost_is_that_of_some_pair(backend):
    costs = LinkCost(pairs_topology(backend))
    every = [costs.between(a, b) for a, b in itertools.permutations(NODES, 2)]
    known = every + [entry.cost() for entry in pairs_topology(backend).fabric.classes]
    assert costs.least() == pytest.approx((min(a for a, _ in known), min(b for _, b in known)))


def test_nothing_is_known_of_nodes_without_links():
    bare = pairs_topology(backend=False).model_copy(update={"fabric": Fabric()})
    bare._pairs = None
    assert LinkCost(bare).least() == (0.0, 0.0)
