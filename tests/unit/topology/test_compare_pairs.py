"""Two large topologies: what differs is found in the figures of all pairs, which only the files beside them have."""

from __future__ import annotations

import numpy as np

from hpctrain.records.topology.link import Latency, Link, LinkFigures
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Fabric, Node, Provenance, Topology
from hpctrain.topology.compare import differences


def large(names: list[str], changed: dict[tuple[str, str], float] | None = None) -> Topology:
    pairs = PairMatrix(names)
    rates = pairs["bytes_per_s"]
    rates[~np.eye(len(names), dtype=bool)] = 1e9
    for (source, target), rate in (changed or {}).items():
        rates[pairs.index[source], pairs.index[target]] = rate
    pairs["latency_p50_s"][:] = 1e-5
    side = LinkFigures(latency_s=Latency(min=1e-5, p50=1e-5, p95=1e-5), loaded_bytes_per_s=5e8)
    made = Topology(
        provenance=Provenance(version="0", created="1970-01-01T00:00:00Z", transport="tcp"),
        device_types={},
        nodes=[Node(id=name, addr="10.0.0.1", devices=[]) for name in names],
        # A pair that is off its class is listed as well, and is told once.
        fabric=Fabric(links=[Link(a=names[-2], b=names[-1], ab=side, ba=side)]),
    )
    return made.with_pairs(pairs)


def test_a_pair_that_changed_is_told_and_no_other() -> None:
    names = [f"n{index}" for index in range(70)]
    before = large(names, {("n5", "n6"): float("nan")})
    after = large(names[1:][::-1], {("n3", "n4"): 5e8, ("n4", "n3"): 0.95e9})

    found = differences(before, after, 0.1)

    assert [(each.group, each.what, each.before, each.after, each.better) for each in found] == [
        ("nodes", "n0", "there", None, None),
        ("links", "n3 -> n4 bandwidth under load", 1e9, 5e8, False),
        ("links", "n5 -> n6 bandwidth under load", None, 1e9, None),
    ]
    assert found[1].nodes == ("n3", "n4")
    assert differences(before, before, 0.0) == []
