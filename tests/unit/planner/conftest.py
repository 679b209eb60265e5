"""Fixtures that give tests the topologies and run files of `topologies_made`, and plans for them."""

from __future__ import annotations

import itertools

import pytest
from topologies_made import run_of, topology_of

from hpctrain.records.topology.link import Latency, Link, LinkFigures
from hpctrain.records.topology.topology import Topology


@pytest.fixture
def topology():
    return topology_of


@pytest.fixture
def run():
    return run_of


@pytest.fixture
def late_links():
    """late_links(topology, p95): every link with that p95 of its latency, alpha and beta as they were by default."""

    def make(topology: Topology, p95: float) -> Topology:
        latency = Latency(min=5e-5, p50=5e-5, p95=p95)
        figures = LinkFigures(latency_s=latency, alpha_s=5e-5, beta_s_per_byte=1e-9)
        pairs = itertools.combinations([node.id for node in topology.nodes], 2)
        links = [Link(a=a, b=b, ab=figures, ba=figures) for a, b in pairs]
        return topology.model_copy(update={"fabric": topology.fabric.model_copy(update={"links": links})})

    return make


@pytest.fixture
def plan(topology, run):
    """plan(topology fields, run fields) -> Plan."""
    from hpctrain.planner import PlanRequest, make_plan

    def make(made=None, solver="auto", **fields):
        asked = run(**fields)
        nodes = made if made is not None else topology()
        return make_plan(asked, asked.spec(), nodes, PlanRequest(solver=solver))

    return make
