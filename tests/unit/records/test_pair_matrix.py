"""Figures of all pairs as a file beside topology.json: verified when read, cut with the nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.base.errors import FileError
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.pair_matrix import FIGURES, PairMatrix
from hpctrain.records.topology.topology import Node, Provenance, Topology

NODES = ["a", "b", "c"]


def topology() -> Topology:
    matrix = PairMatrix(NODES)
    for row in range(3):
        for column in range(3):
            if row != column:
                matrix["latency_p50_s"][row, column] = 1e-5
                matrix["bytes_per_s"][row, column] = 1e9 * (1 + row + column)
    bare = Topology(
        provenance=Provenance(version="0", created="1970-01-01T00:00:00Z", transport="tcp"),
        device_types={},
        nodes=[Node(id=name, addr="", devices=[]) for name in NODES],
    )
    return bare.with_pairs(matrix)


def test_what_is_written_is_read_and_answers_costs(tmp_path: Path) -> None:
    topology().write(tmp_path / "t.json")
    found = Topology.read(tmp_path / "t.json")

    assert found.pairs is not None
    assert all(np.array_equal(found.pairs[name], topology().pairs[name], equal_nan=True) for name in FIGURES)
    assert LinkCost(found).between("a", "c") == pytest.approx((1e-5, 1 / 3e9))
    assert found.sha256() == topology().sha256(), "the same figures are the same file"


def test_some_nodes_keep_their_figures(tmp_path: Path) -> None:
    topology().only(["c", "b"]).write(tmp_path / "t.json")
    found = Topology.read(tmp_path / "t.json")

    assert found.pairs is not None
    assert found.pairs.nodes == ["b", "c"]
    assert LinkCost(found).between("b", "c")[1] == pytest.approx(1 / 4e9)


def test_a_missing_or_changed_file_is_told_with_what_to_do(tmp_path: Path) -> None:
    topology().write(tmp_path / "t.json")
    (beside,) = tmp_path.glob("pairs-*.npz")
    data = beside.read_bytes()

    beside.write_bytes(data[:-1] + b"x")
    with pytest.raises(FileError, match="damaged or of another probe"):
        Topology.read(tmp_path / "t.json")
    beside.unlink()
    with pytest.raises(FileError, match="copy it from beside the original"):
        Topology.read(tmp_path / "t.json")


def test_a_file_outside_the_folder_is_not_taken() -> None:
    value = topology().to_json()
    value["fabric"]["matrix"]["file"] = "../pairs-000000000000.npz"

    with pytest.raises(FileError, match=r"fabric\.matrix\.file"):
        Topology.from_json(value)
