"""A request against a real cluster's description: every problem at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.slurm.cluster import parse_nodes, parse_partitions
from hpctrain.slurm.limits import JobRequest, check_request, default_partition

FINE = JobRequest(
    partition="low", nodes_min=2, nodes_max=3, time_s=3600, gpus_per_node=4, account="physics", qos="normal"
)


@pytest.fixture
def nodes(captured):
    return parse_nodes(captured.sections("nodes.txt")["idle"])


@pytest.fixture
def partitions(captured, nodes):
    return parse_partitions(captured.text("partitions.txt"), nodes)


def test_a_request_that_fits(partitions, nodes):
    assert check_request(FINE, partitions, nodes) == []
    assert check_request(replace(FINE, partition=None), partitions, nodes) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"partition": "lowe"}, "cluster.partition: found 'lowe'; allowed: low, high, short, mig, old; "
                                "did you mean 'low'?"),
        ({"partition": "old", "nodes_min": 1}, "cluster.partition: 'old' is down; choose another"),
        ({"nodes_min": 4}, "cluster.nodes: found 4; allowed: 1 to 3, as partition 'low' has no more"),
        ({"partition": "high", "nodes_min": 3}, "cluster.nodes: found 3; allowed: 1 to 2 for one job"),
        ({"gpus_per_node": 9}, "cluster.devices_per_node: found 9; allowed: 0 to 8"),
        ({"gpus_per_node": 8}, "cluster.devices_per_node: found 8 on 2 nodes; only 1 of the 3 nodes"),
        ({"time_s": 3 * 86400}, "cluster.time: found 3-00:00:00; allowed: up to 2-00:00:00 in partition 'low'"),
        ({"partition": "high", "account": "bio"}, "cluster.account: found 'bio'; allowed in partition 'high': "
                                                  "physics, chem"),
        ({"partition": "short", "time_s": 60, "account": "guests"}, "cluster.account: found 'guests'; not allowed"),
    ],
)  # fmt: skip
def test_one_problem_one_line(partitions, nodes, change, line):
    known = [partition for partition in partitions if partition.name != "urgent"]
    (found,) = check_request(replace(FINE, **change), known, nodes)
    assert found.startswith(line)


def test_all_problems_at_once(partitions, nodes):
    request = JobRequest("high", 5, 5, None, 16, "bio", None)
    assert [line.split(":")[0] for line in check_request(request, partitions, nodes)] == [
        "cluster.nodes",
        "cluster.devices_per_node",
        "cluster.account",
    ]


def test_of_several_partitions_one_that_fits_is_enough(partitions, nodes):
    wide = replace(FINE, nodes_min=3)
    assert check_request(replace(wide, partition="high,low"), partitions, nodes) == []
    assert len(check_request(replace(wide, partition="high,short", time_s=60), partitions, nodes)) == 2
    assert "'nope'" in check_request(replace(wide, partition="low,nope"), partitions, nodes)[0]


def test_qos(partitions, nodes):
    low = replace(default_partition(partitions), allow_qos=("normal", "long"), deny_qos=())
    (line,) = check_request(replace(FINE, qos="fast"), [low], nodes)
    assert line == "cluster.qos: found 'fast'; allowed in partition 'low': normal, long"
    denying = replace(low, allow_qos=None, deny_qos=("fast",))
    assert check_request(replace(FINE, qos="fast"), [denying], nodes) == [
        "cluster.qos: found 'fast'; not allowed in partition 'low'"
    ]
    assert check_request(replace(FINE, qos=None), [low, denying], nodes) == []


def test_a_cluster_without_a_default_needs_a_name(partitions, nodes):
    others = [partition for partition in partitions if not partition.default]
    assert default_partition(others) is None
    (line,) = check_request(replace(FINE, partition=None), others, nodes)
    assert line.startswith("cluster.partition: not given, and this cluster has no default; allowed: high")


def test_nodes_that_nobody_described_are_not_judged(partitions):
    assert check_request(replace(FINE, gpus_per_node=64), partitions, []) == []
