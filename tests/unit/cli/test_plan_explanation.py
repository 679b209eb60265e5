"""What `hpctrain plan --explain` prints of two plans, compared with texts in tests/golden/explain.

The plans are files, so that the texts do not depend on the search. Figures in the texts are not compared, because those
of the critical path depend on the constants of the cost model.
"""

from __future__ import annotations

import io
import re
from itertools import combinations
from pathlib import Path

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.cli.views.console import Console
from hpctrain.cli.views.plan_explanation import explanation
from hpctrain.planner import make_plan
from hpctrain.planner.explain import IdleDevices, extra_neighbours, idle_devices
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.prediction import Rejected
from hpctrain.records.run.run import FixedParallel, Run
from hpctrain.records.topology.topology import Topology

GOLDEN = Path(__file__).parents[2] / "golden" / "explain"
IDLE = IdleDevices(
    (DeviceId("local3:cpu0"),), 4,
    Rejected(change="pp 2 × dp 2 × tp 1", delta_s=0.00642, reason="compute is 31.8 ms instead of 26.7 ms"),
)  # fmt: skip


def run_of(name: str) -> Run:
    dims = {
        "laptop": {"layers": 3, "dim": 128, "heads": 4, "vocab": 512},
        "paper": {"layers": 24, "dim": 2048, "heads": 16, "vocab": 50304},
    }[name]
    return Run.from_json(
        {
            "steps": 10, "model": {"dims": dims}, "data": {"train": ["/data"], "seq_len": 64},
            "batch": {"global": 6 if name == "laptop" else 64}, "precision": "fp32" if name == "laptop" else "fp16",
        }
    )  # fmt: skip


def explain(
    name: str, topology_file: str, width: int, idle: IdleDevices | None, bound_s: float | None = None,
    slower_links: float = 1.0,
) -> str:  # fmt: skip
    run, topology = run_of(name), Topology.read(package_data_path("topology", topology_file))
    links = dict.fromkeys(combinations([node.id for node in topology.nodes], 2), slower_links)
    topology = topology if slower_links == 1 else apply_changes(topology, TopologyChanges(links=links))
    plan = Plan.read(GOLDEN / f"{name}.plan.json")
    if bound_s is not None:
        plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"bound_s": bound_s})})
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(explanation(plan, topology, layout_of_plan(run, run.spec(), plan, topology), 0.9, [], idle))
    text = console.file
    assert isinstance(text, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def without_figures(text: str) -> list[str]:
    """The lines with '#' for each figure, with one blank or line for each run of them, and without the actions of the
    critical path."""
    text = re.sub(r"[█·]+\|[█·]+", "BAR", text)
    text = re.sub(r"(?m)^│ (\d+ +│ \d+[FBIW]|… ).*\n", "", text)
    return re.sub(r"([ ━─])\1+", r"\1", re.sub(r"\d+(\.\d+)?(%| [um]?s\b| [KMG]iB)", "#", text)).splitlines()


@pytest.mark.parametrize(
    ("name", "topology_file", "width", "idle"),
    [("laptop", "laptop-4-nodes.json", 80, IDLE), ("paper", "paper-32-gpu.json", 120, None)],
)
def test_the_explanation_of_a_plan_is_the_golden_one(
    name: str, topology_file: str, width: int, idle: IdleDevices | None
) -> None:
    text = explain(name, topology_file, width, idle)

    assert without_figures(text) == without_figures((GOLDEN / f"{name}.txt").read_text())
    assert max(map(len, text.splitlines())) <= width


def test_sums_that_begin_before_the_last_backward_ends_have_a_row_of_their_own() -> None:
    assert "sums beside these" not in explain("laptop", "laptop-4-nodes.json", 80, None)
    assert "sums beside these" in explain("laptop", "laptop-4-nodes.json", 80, None, slower_links=0.02)


def test_replicas_with_equal_work_on_equal_devices_share_a_row() -> None:
    lines = explain("paper", "paper-32-gpu.json", 120, None).splitlines()

    plan = Plan.read(GOLDEN / "paper.plan.json")
    groups = [line.split()[1] for line in lines if "│ embedding, " in line]
    assert (plan.dp, plan.pp, len(plan.ranks)) == (8, 4, 32)
    assert groups == ["0-5", "6-7"]
    assert "6 × rtx-4090: n[01,05,09]:cuda[0-1]" in next(line for line in lines if "│ embedding, " in line)
    assert sum(", head" in line for line in lines) == len(groups)


def test_a_bound_far_below_the_step_is_not_shown() -> None:
    step_s = 0.393
    text = explain("paper", "paper-32-gpu.json", 120, None, bound_s=0.84 * step_s)

    assert "Lower bound: none is shown" in text
    assert "can be saved" not in text
    assert "can be saved" in explain("paper", "paper-32-gpu.json", 120, None, bound_s=0.86 * step_s)


def test_idle_devices_are_compared_with_the_best_plan_that_uses_all() -> None:
    value = run_of("laptop").to_json()
    value["model"]["dims"] |= {"dim": 64}
    run, topology = Run.from_json(value), Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    plan = make_plan(run, run.spec(), topology)
    fixed = run.model_copy(update={"parallel": Run.from_json(run.to_json() | {"parallel": FIXED}).parallel})

    assert idle_devices(run, run.spec(), topology, make_plan(fixed, run.spec(), topology)) is None
    idle = idle_devices(run, run.spec(), topology, plan)
    assert idle is not None
    assert len(idle.device_ids) + plan.world_size == idle.usable == 4
    assert set(idle.device_ids).isdisjoint(plan.ranks)
    assert idle.all_used.delta_s is not None
    assert idle.all_used.delta_s > 0


FIXED = {"mode": "fixed", "pp": 2, "dp": 2, "tp": 1}


def test_why_no_plan_uses_all_devices_is_said() -> None:
    """Three blocks, three heads and two sequences make no plan of four devices."""
    value = run_of("laptop").to_json() | {"batch": {"global": 1}}
    value["model"]["dims"] |= {"heads": 3, "dim": 96}
    run, topology = Run.from_json(value), Topology.read(package_data_path("topology", "laptop-4-nodes.json"))

    idle = idle_devices(run, run.spec(), topology, make_plan(run, run.spec(), topology))

    assert idle is not None
    assert idle.all_used.delta_s is None
    assert idle.all_used.reason


@pytest.mark.slow
def test_a_faster_plan_without_a_node_says_how_to_get_it() -> None:
    run, topology = run_of("laptop"), Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    by_hand = run.model_copy(update={"parallel": FixedParallel(mode="fixed", pp=3, dp=1, tp=1)})
    plan = make_plan(by_hand, run.spec(), topology)

    faster = [entry for entry in extra_neighbours(by_hand, run.spec(), topology, plan) if (entry.delta_s or 0) < 0]

    assert any(entry.change.startswith("without ") for entry in faster)
    for entry in faster:
        how = entry.change.replace("without", "--forbid") if "without" in entry.change else "parallel.mode fixed"
        assert entry.reason == f"faster; a search tries only likely plans, and one by hand none: use {how}"
