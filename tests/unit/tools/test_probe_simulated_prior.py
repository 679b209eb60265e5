"""A file that says which nodes share a switch saves a sampled probe its search, and is not believed where it errs."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.measurement_schedule import switch_tree
from hpctrain.probe.pair_selection.switches import switches_of
from tools.probe_simulation.fabric import FabricSpec, SimulatedFabric
from tools.probe_simulation.tables import node_names, pair_f1, simulated_probe

pytestmark = pytest.mark.slow

SPEC = FabricSpec(192, per_leaf=16, noise=0.05, oversubscription=(2.0, 1.0))
SETTINGS = ProbeSettings(mode="sampled", device="none")
NAMES = node_names(SPEC.nodes)


def probed(prior: dict | None):
    fabric = SimulatedFabric(SPEC, seed=1)
    outcome = simulated_probe(fabric, SETTINGS, prior=prior)
    tree = switch_tree(outcome, SETTINGS)
    return outcome, tree, pair_f1(tree.levels[0], fabric.leaf)


@pytest.fixture(scope="module")
def search():
    return probed(None)


def test_an_earlier_probe_is_a_prior_and_saves_the_search(search) -> None:
    earlier = assemble(search[0], SETTINGS, wall=0.0)

    outcome, tree, found = probed(switches_of(earlier))

    assert (tree.source, found) == ("prior", 1.0)
    assert outcome.rounds_done < search[0].rounds_done
    again = assemble(outcome, SETTINGS, wall=0.0)
    assert {cluster.source for cluster in again.fabric.clusters} == {"prior"}


@pytest.mark.parametrize("moved", [2, 192])
def test_switches_that_latencies_contradict_are_measured(moved: int) -> None:
    leaves = np.arange(SPEC.nodes) // SPEC.per_leaf
    places = np.linspace(0, SPEC.nodes - 1, moved).astype(int)
    leaves[places] = np.roll(leaves[places], 1 if moved == 2 else 8)

    _, tree, found = probed({name: ["top", f"leaf{leaf}"] for name, leaf in zip(NAMES, leaves.tolist(), strict=True)})

    assert tree.source == "measured"
    assert found >= 0.99


def test_a_prior_of_other_nodes_is_no_prior(search) -> None:
    outcome, tree, _ = probed({"elsewhere": ["top", "leaf0"]})

    assert tree.source == "measured"
    assert outcome.rounds_done == search[0].rounds_done
