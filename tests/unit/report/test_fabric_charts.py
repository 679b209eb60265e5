"""Heat maps of large clusters: their pairs lie beside the topology, and many are drawn as blocks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Node, Provenance, Topology
from hpctrain.report.html.charts.matrices import MOST_ROWS, fabric_charts


def large(count: int) -> Topology:
    """The pair (0, 1) has 2 GB/s under load, all others 1 GB/s; nothing was measured alone."""
    names = [f"n{index:03d}" for index in range(count)]
    pairs = PairMatrix(names)
    pairs["bytes_per_s"][~np.eye(count, dtype=bool)] = 1e9
    pairs["bytes_per_s"][0, 1] = 2e9
    pairs["latency_p50_s"][2, 3] = 1.23456e-5
    nodes = [Node(id=name, addr="10.0.0.1", devices=[]) for name in names]
    return Topology(
        provenance=Provenance(version="0", created="1970-01-01T00:00:00Z", transport="tcp"),
        device_types={},
        nodes=nodes,
    ).with_pairs(pairs)


def test_every_pair_of_the_file_beside_it_is_drawn() -> None:
    charts = {chart.id: chart for chart in fabric_charts(large(70))}

    assert set(charts) == {"loaded-bandwidth", "latency"}
    values = charts["loaded-bandwidth"].to_json()
    assert (len(values["columns"]), len(values["cells"]), len(values["cells"][0])) == (70, 70, 70)
    assert [values["cells"][0][column] for column in (0, 1, 2)] == [None, 2.0, 1.0]
    assert charts["latency"].to_json()["cells"][2][3] == pytest.approx(12.35)


def test_many_nodes_are_drawn_as_blocks() -> None:
    chart = next(chart for chart in fabric_charts(large(2 * MOST_ROWS + 1)) if chart.id == "loaded-bandwidth")

    assert len(chart.columns) == 86  # three nodes a block, the last one has two
    assert (chart.columns[0], chart.columns[-1]) == ("n000 to n002", "n255 to n256")
    assert {round(value, 6) for row in chart.cells for value in row} == {1.0}  # the median of a block
    assert "257 nodes" in chart.note
