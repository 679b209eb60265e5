"""The real coordinator and verdict on a simulated fabric: what is found, what is not, what a fault costs in time."""

from __future__ import annotations

import random

import pytest

from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.coordinator import GRACE_S
from hpctrain.records.topology.topology import Topology
from tools.probe_simulation.fabric import FabricFaults, FabricSpec, SimulatedFabric
from tools.probe_simulation.tables import (
    SimulationPlan,
    health_row,
    node_names,
    play,
    runtime_row,
    simulated_probe,
    switch_row,
)
from tools.probe_simulation.transport import Failures

pytestmark = pytest.mark.slow

TWO_TO_ONE = FabricSpec(128, per_leaf=16, noise=0.05, hop_gap=0.2, oversubscription=(2.0, 1.0))


def probed(spec: FabricSpec, mode: str, faults: FabricFaults | None = None, **how) -> Topology:
    settings = ProbeSettings(mode=mode, device="none")
    return assemble(simulated_probe(SimulatedFabric(spec, faults, seed=1), settings, **how), settings, wall=0.0)


def codes(topology: Topology) -> dict[str, str]:
    """Code by what it is about."""
    named = {fault.text.split(":")[0].removeprefix("link "): fault.code for fault in topology.verdict.faults}
    return {("fabric" if "switches" in what else what): code for what, code in named.items()}


def test_every_injected_fault_gets_its_code_and_no_other_is_named() -> None:
    faults = FabricFaults(
        sends={5: 0.7}, receives={5: 0.7, 9: 0.5}, latency={77: 2.0}, links={(20, 40): 0.4}
    )  # fmt: skip

    found = probed(TWO_TO_ONE, "full", faults)

    assert codes(found) == {
        "n0005": "SLOW_NODE",
        "n0009": "ASYMMETRIC",
        "n0077": "SLOW_NODE",
        "n0020 - n0040": "SLOW_LINK",
        "fabric": "OVERSUBSCRIBED",
    }
    assert found.verdict.exclude == ["n0005", "n0009", "n0077"]
    assert found.verdict.sbatch_hint == "--exclude=n[0005,0009,0077]"
    assert found.verdict.env == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert all(fault.evidence and fault.fix for fault in found.verdict.faults)


@pytest.mark.parametrize("mode", ["health", "full", "sampled"])
def test_a_clean_fabric_has_no_fault(mode: str) -> None:
    found = probed(FabricSpec(96, per_leaf=16, bursts=0.1), mode)

    assert found.verdict.faults == []
    assert found.verdict.status == "go"


def test_two_levels_of_switches_are_found_with_their_ratios() -> None:
    spec = FabricSpec(128, per_leaf=8, leaves_per_pod=4, noise=0.05, hop_gap=0.2, oversubscription=(4.0, 2.0))

    found = probed(spec, "full")

    by_level = {level: [c for c in found.fabric.clusters if c.level == level] for level in (1, 2)}
    assert [len(clusters) for clusters in by_level.values()] == [16, 4]
    assert {cluster.parent for cluster in by_level[1]} == {cluster.id for cluster in by_level[2]}
    assert by_level[1][0].oversubscription == pytest.approx(4.0, rel=0.15)
    assert by_level[2][0].oversubscription == pytest.approx(8.0, rel=0.15)
    assert [entry.id for entry in found.fabric.classes] == ["same_switch", "same_level2", "across"]
    alphas = [entry.alpha_s for entry in found.fabric.classes]
    assert alphas == sorted(alphas)


@pytest.mark.parametrize(("nodes", "mode", "ratio"), [(64, "full", 2.0), (192, "sampled", 4.0)])
def test_leaves_and_ratios_are_recovered(nodes: int, mode: str, ratio: float) -> None:
    row = switch_row(nodes, mode, ratio, runs=1)

    assert row.f1_min >= 0.99
    assert row.ratio_error_max <= 0.15
    assert row.rounds < nodes * (0.5 if mode == "sampled" else 1.5)


def test_what_slurm_tells_replaces_the_search_for_switches() -> None:
    told = probed(FabricSpec(96, per_leaf=16), "sampled", switches=True)

    assert {cluster.source for cluster in told.fabric.clusters} == {"slurm"}
    assert told.fabric.held_out_error is not None
    assert told.fabric.held_out_error < 0.1
    assert told.provenance.rounds_done < 80


def test_a_fabric_without_switches_has_none_invented() -> None:
    flat = probed(FabricSpec(32, per_leaf=32, noise=0.05, bursts=0.1), "full")

    assert flat.fabric.clusters == []
    assert [entry.id for entry in flat.fabric.classes] == ["network"]


def test_fifteen_rounds_tell_health_where_two_do_not() -> None:
    few, enough = (health_row(SimulationPlan(runs=10, nodes=48), rounds, noise=0.03, bursts=0.1) for rounds in (2, 15))

    assert enough.found_20 == 1.0
    assert enough.false_positive <= 0.001
    assert enough.found_10 > few.found_10


@pytest.mark.parametrize("seed", range(3))
def test_lost_nodes_cost_a_deadline_each_and_the_rest_is_measured(seed: int) -> None:
    rng = random.Random(seed)
    absent, dead, hung = rng.sample(range(32), 3)
    settings = ProbeSettings(device="none", join_deadline_s=10.0, slot_deadline_s=5.0)
    begin = 10.1  # they join at once, and the door is held for the one that never comes
    fabric = SimulatedFabric(FabricSpec(32, per_leaf=8), seed=seed)

    clean = simulated_probe(SimulatedFabric(FabricSpec(32, per_leaf=8), seed=seed), settings)
    outcome = simulated_probe(
        fabric, settings, Failures(frozenset({absent}), {dead: begin + 0.3}, {hung: begin + 0.5})
    )  # fmt: skip

    names = node_names(32)
    assert set(outcome.lost) == {names[absent], names[dead], names[hung]}
    # The join deadline, and a slot's with the grace that its partner is given; on the simulated clock.
    assert outcome.wall_s < clean.wall_s + settings.join_deadline_s + settings.slot_deadline_s + GRACE_S + 1.0
    left = [index for index in range(32) if index not in (absent, dead, hung)]
    measured = {frozenset((pair.a, pair.b)) for pair in outcome.pairs}
    wanted = {frozenset((names[a], names[b])) for a in left for b in left if a < b}
    assert len(wanted - measured) <= 2, "only the partners of the round in which a node was lost"


def test_a_thousand_nodes_have_their_health_told_in_seconds() -> None:
    settings = ProbeSettings(mode="health", device="none")

    outcome = simulated_probe(SimulatedFabric(FabricSpec(1000)), settings)

    assert outcome.rounds_done == 15
    assert outcome.wall_s < 60


def test_a_round_costs_little_beside_its_transfers() -> None:
    row = runtime_row(200, "health", 25.0)

    assert 0 < row.overhead_s <= 0.1
    assert row.overhead_s * row.rounds < row.wall_s


def test_the_same_seed_measures_the_same() -> None:
    def once() -> list:
        outcome, settings = ProbeOutcome(node_names(16)), ProbeSettings(seed=3, device="none")
        play(outcome, SimulatedFabric(FabricSpec(16, per_leaf=4), seed=3), settings)
        return outcome.pairs

    assert once() == once()
