"""Writes links as comma-separated values, one row for each directed pair of nodes. Pure."""

from __future__ import annotations

import csv
import io
import itertools
import math

from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Topology

COLUMNS = (
    "source", "target", "class", "latency_min_s", "latency_p50_s", "latency_p95_s", "isolated_bytes_per_s",
    "loaded_bytes_per_s", "concurrency", "alpha_s", "beta_s_per_byte", "n", "inferred",
)  # fmt: skip


def pairs_csv(topology: Topology) -> str:
    """Return a CSV text with a heading line and a row for each directed pair of nodes. The cell of an unknown figure is
    empty.

    For a pair that the topology does not list as a link, alpha and beta are those that the planner uses. The column
    `inferred` is then true, unless the pair matrix of a large topology has figures of the pair.
    """
    sides = {ends: (link, side) for link in topology.fabric.links for ends, side in link.directions()}
    costs, out = LinkCost(topology), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for source, target in itertools.permutations([node.id for node in topology.nodes], 2):
        if (source, target) in sides:
            writer.writerow([source, target, *_measured(*sides[source, target])])
            continue
        cost = costs.find(source, target)
        if cost is None:
            writer.writerow([source, target, *[""] * 11])
            continue
        latencies, measured = _of_matrix(topology, source, target)
        inferred = "false" if measured else "true"
        writer.writerow([source, target, "", *latencies, "", *map(repr, cost), "", inferred])
    return out.getvalue()


def _of_matrix(topology: Topology, source: str, target: str) -> tuple[list[str], bool]:
    """Return (five cells of a pair from the pair matrix: latency min, p50 and p95 in seconds, isolated and loaded
    bandwidth in bytes/s; whether any of them was measured). A cell is empty if its figure was not measured, or if the
    topology has no pair matrix."""
    pairs = topology.pairs
    names = ("latency_min_s", "latency_p50_s", "latency_p95_s", "isolated_bytes_per_s", "bytes_per_s")
    if pairs is None:
        return [""] * len(names), False
    values = [float(pairs[name][pairs.index[source], pairs.index[target]]) for name in names]
    cells = ["" if math.isnan(value) else repr(value) for value in values]
    return cells, any(cells)


def _measured(link: Link, figures: LinkFigures) -> list[str]:
    latency = figures.latency_s
    values = (
        *((latency.min, latency.p50, latency.p95) if latency else (None, None, None)),
        figures.isolated_bytes_per_s, figures.loaded_bytes_per_s, figures.concurrency, figures.alpha_s,
        figures.beta_s_per_byte, figures.n,
    )  # fmt: skip
    cells = ["" if value is None else repr(value) for value in values]
    return [link.class_ or "", *cells, "true" if figures.inferred else "false"]
