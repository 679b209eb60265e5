"""The reference files in topology/: each is valid, says where it is from, and can be planned on."""

from pathlib import Path

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.planner import make_plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Topology

FILES = sorted(path.name for path in Path(package_data_path("topology")).glob("*.json"))
RUN = Run.from_json(
    {
        "steps": 10,
        "model": {"dims": {"layers": 4, "dim": 64, "heads": 4, "vocab": 256}},
        "data": {"train": ["/data"], "seq_len": 64},
        "batch": {"global": 64},
        "precision": "fp32",
        "parallel": {"mode": "fixed", "pp": 1, "dp": 4, "tp": 1},
        "recovery": {"spares": 0},
    }
)


def test_the_table_in_the_readme_names_every_file() -> None:
    text = Path(package_data_path("topology", "README.md")).read_text()

    assert [name for name in FILES if f"| `{name}` |" not in text] == []
    assert {"dgx-h100-32-gpu.json", "lab-4-nodes.json", "laptop-4-nodes.json", "paper-32-gpu.json"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_reference_file_is_valid_and_can_be_planned_on(name: str) -> None:
    topology = Topology.read(package_data_path("topology", name))

    plan = make_plan(RUN, RUN.spec(), topology)

    assert topology.provenance.notes
    assert (topology.provenance.mode == "published") == (topology.provenance.rounds_done == 0)
    assert plan.dp == 4
    assert plan.predicted is not None
    assert plan.predicted.step_time_s["total"] > 0


def test_the_published_files_have_the_figures_of_their_notes() -> None:
    paper = Topology.read(package_data_path("topology", "paper-32-gpu.json"))
    dgx = Topology.read(package_data_path("topology", "dgx-h100-32-gpu.json"))

    assert len(paper.device_ids()) == len(dgx.device_ids()) == 32
    assert LinkCost(paper).between("n01", "n09") == (5e-6, 8e-11)
    assert LinkCost(paper).between("n09", "n09")[1] == 1 / 31.5e9
    assert LinkCost(dgx).between("dgx1", "dgx4") == (5e-6, 1 / 50e9)
    assert {len({device.nic for device in node.devices}) for node in dgx.nodes} == {8}
    assert LinkCost(dgx).between("dgx1", "dgx1")[1] == 1 / 450e9


def test_the_measured_files_say_whether_their_links_are_a_network() -> None:
    loopback = {name: Topology.read(package_data_path("topology", name)).provenance.loopback for name in FILES}

    assert (loopback["laptop-4-nodes.json"], loopback["lab-4-nodes.json"]) == (True, False)
