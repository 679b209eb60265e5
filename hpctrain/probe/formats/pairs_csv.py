"""Links as comma-separated values: one row for each directed pair of nodes. Pure."""

from __future__ import annotations

import csv
import io
import itertools

from hpctrain.records.link import Link, LinkFigures
from hpctrain.records.link_cost import LinkCost
from hpctrain.records.topology import Topology

COLUMNS = (
    "source", "target", "class", "latency_min_s", "latency_p50_s", "latency_p95_s", "isolated_bytes_per_s",
    "loaded_bytes_per_s", "concurrency", "alpha_s", "beta_s_per_byte", "n", "inferred",
)  # fmt: skip


def pairs_csv(topology: Topology) -> str:
    """A table with a heading; what was not measured is empty.

    A pair that the file does not list has the alpha and beta that the planner takes for it, and `inferred` is true.
    """
    sides: dict[tuple[str, str], tuple[Link, LinkFigures]] = {}
    for link in topology.fabric.links:
        sides[link.a, link.b] = (link, link.ab)
        sides[link.b, link.a] = (link, link.ba)
    costs, out = LinkCost(topology), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for source, target in itertools.permutations([node.id for node in topology.nodes], 2):
        if (source, target) in sides:
            writer.writerow([source, target, *_measured(*sides[source, target])])
            continue
        try:
            alpha, beta = costs.between(source, target)
        except KeyError:
            writer.writerow([source, target, *[""] * 11])
            continue
        writer.writerow([source, target, *[""] * 7, repr(alpha), repr(beta), "", "true"])
    return out.getvalue()


def _measured(link: Link, figures: LinkFigures) -> list[str]:
    latency = figures.latency_s
    values = (
        *((latency.min, latency.p50, latency.p95) if latency else (None, None, None)),
        figures.isolated_bytes_per_s, figures.loaded_bytes_per_s, figures.concurrency, figures.alpha_s,
        figures.beta_s_per_byte, figures.n,
    )  # fmt: skip
    cells = ["" if value is None else repr(value) for value in values]
    return [link.class_ or "", *cells, "true" if figures.inferred else "false"]
