"""What changed between two files."""

from pathlib import Path

from hpctrain.base.packaged import packaged
from hpctrain.probe.compare import differences
from hpctrain.records.link_cost import LinkCost
from hpctrain.records.topology import Topology


def laptop() -> Topology:
    return Topology.read(packaged("topology", "laptop-4-nodes.json"))


def test_a_file_does_not_differ_from_itself() -> None:
    assert differences(laptop(), laptop(), 0.0) == []


def test_a_changed_figure_and_a_lost_node_are_found() -> None:
    before = laptop()
    slower = before.nodes[0].devices[0].model_copy(update={"memory_bytes_per_s": 1.0})
    node = before.nodes[0].model_copy(update={"devices": [slower]})
    after = before.only(["local0", "local1"]).model_copy(update={"nodes": [node, before.nodes[1]]})

    found = {entry.what: entry for entry in differences(before, after, 0.1)}

    assert found["local0:cpu0 memory bandwidth"].after == 1.0
    assert found["local0:cpu0 memory bandwidth"].ratio < 0.1
    assert found["local3:cpu0 fp32"].after is None
    assert "local0 -> local3 latency" in found
    assert "local0 -> local1 latency" not in found


def test_the_reference_files_are_valid_and_say_where_they_come_from() -> None:
    folder = Path(packaged("topology"))
    files = sorted(folder.glob("*.json"))
    assert [file.name for file in files] == ["laptop-4-nodes.json", "paper-32-gpu.json"]

    paper = Topology.read(packaged("topology", "paper-32-gpu.json"))
    assert len(paper.places()) == 32
    assert paper.provenance.mode == "published"
    assert paper.provenance.notes
    assert LinkCost(paper).between("n01:cuda0", "n09:cuda2") == (5e-6, 8e-11)
    assert LinkCost(paper).between("n09:cuda0", "n09:cuda2")[1] == 1 / 31.5e9
    assert laptop().provenance.loopback is True
