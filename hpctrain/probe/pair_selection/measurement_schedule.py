"""Makes the measurement schedule of a probe: chooses the next rounds from the measurements so far. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection import rounds, switches
from hpctrain.probe.pair_selection.outliers import relative_performance, suspect_links, suspects
from hpctrain.probe.pair_selection.rounds import Round
from hpctrain.probe.pair_selection.switches import SwitchTree

MIN_NODES_TO_RETEST = 4
"""Fewest living nodes for a retest: a suspect, its partner, and two good nodes that measure each other for
comparison."""


def measurement_schedule(outcome: ProbeOutcome, settings: ProbeSettings) -> Iterator[list[Round]]:
    """Yield lists of rounds, in the order in which a probe measures them. The caller measures each list and enters the
    results into `outcome` before it takes the next list, which depends on them.

    The first list has the rounds with which the mode begins. In the mode sampled, further lists follow until it is
    known which nodes share a switch. In every mode but health, if switches are known, the next list has the rounds
    that show the oversubscription of each switch level. The last list has the retests of suspects, if there are any.
    With `settings.loopback` there is only the first list, because virtual nodes of one machine have no switches and
    differ by chance.
    """
    yield rounds.plan_rounds(len(outcome.nodes), _first_step(outcome, settings))
    if settings.loopback:
        return
    if settings.mode == "sampled":
        yield from _sample(outcome, settings)
    tree = switch_tree(outcome, settings)
    if tree.levels and settings.mode != "health":
        yield rounds.contention_rounds(tree, _alive(outcome), settings.seed)
    again = _retests(outcome, settings, tree)
    if again:
        yield again


def switch_tree(outcome: ProbeOutcome, settings: ProbeSettings) -> SwitchTree:
    """Return the switch levels above the nodes.

    The mode full infers them from latencies. The mode health takes those that the prior or Slurm declares. The mode
    sampled takes the declared ones unless latencies contradict them, and otherwise infers them. The tree has no levels
    for virtual nodes of one machine, and with fewer than `MIN_NODES_FOR_TREE` living nodes.
    """
    declared = _declared_tree(outcome)
    if settings.loopback or len(outcome.alive) < switches.MIN_NODES_FOR_TREE:
        return SwitchTree()
    if settings.mode == "health":
        return declared
    if settings.mode == "sampled":
        groups = _groups(outcome)
        return (
            declared
            if declared.levels and not switches.contradicts(declared, groups)
            else switches.sampled_tree(groups)
        )
    return switches.infer_tree(switches.distances_of(outcome.matrix()))


def retest_candidates(
    outcome: ProbeOutcome, settings: ProbeSettings, tree: SwitchTree
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (nodes, links) to measure again before they are reported as slow, each list with the worst first. A node
    is given by its index, a link by the indexes of its two nodes.

    The links of listed nodes are left out. The mode health lists no links, because it measures too few pairs to judge
    one.
    """
    matrix = outcome.matrix()
    now = relative_performance(matrix, tree)
    nodes = suspects(now, settings.slow_ratio)
    if settings.mode == "health":
        return nodes, []  # too few pairs to judge a link
    known = set(nodes)
    links = [pair for pair in suspect_links(matrix, tree, now, rounds.MAX_LINKS + len(nodes)) if not known & set(pair)]
    return nodes, links[: rounds.MAX_LINKS]


def _retests(outcome: ProbeOutcome, settings: ProbeSettings, tree: SwitchTree) -> list[Round]:
    alive = _alive(outcome)
    if len(alive) < MIN_NODES_TO_RETEST:
        return []
    nodes, links = retest_candidates(outcome, settings, tree)
    good = [node for node in alive if node not in set(nodes)]
    if len(good) < max(MIN_NODES_TO_RETEST - 1, len(nodes)):
        return []  # with too few good nodes there is nothing to compare with
    return rounds.retest_nodes(nodes[: rounds.MAX_SUSPECTS], good, tree) + rounds.retest_links(links, good, tree)


def _first_step(outcome: ProbeOutcome, settings: ProbeSettings) -> ProbeSettings:
    """Return the settings for the first rounds of a probe. If the prior or Slurm declares switches, the mode sampled
    begins with fewer random rounds: these rounds only judge the nodes and need not find the switches.
    """
    if settings.mode == "sampled" and _declared_tree(outcome).levels:
        return replace(settings, sampled_rounds=settings.health_rounds)
    return settings


def _sample(outcome: ProbeOutcome, settings: ProbeSettings) -> Iterator[list[Round]]:
    """Yield lists of rounds until it is known which nodes share a switch, or until the probe has made the most rounds
    that `ROUNDS_SHARE_MAX` allows.

    If switches are declared, the first list has rounds within each leaf switch, which test the declaration. Further
    lists follow only if the latencies measured in these rounds contradict the declaration.
    """
    declared = _declared_tree(outcome)
    if declared.levels:
        yield _inside_leaves(declared, _alive(outcome), settings.seed)
        if not switches.contradicts(declared, _groups(outcome)):
            return
    rng = random.Random(settings.seed)
    for _ in range(int(switches.ROUNDS_SHARE_MAX * len(outcome.nodes)) - settings.sampled_rounds):
        groups = _groups(outcome)
        met = switches.next_round(groups, rng) if groups.near_below is not None else []
        if not met:
            return
        yield [Round(tuple(met), alone=False)]


def _inside_leaves(tree: SwitchTree, alive: Sequence[int], seed: int) -> list[Round]:
    """Return rounds that together have every pair of the nodes `alive` that share a leaf switch. All leaf switches are
    measured at the same time."""
    schedules = [
        [[(nodes[a], nodes[b]) for a, b in met] for met in rounds.rounds(len(nodes), seed)]
        for nodes in tree.members(1, alive)
    ]
    turns = itertools.zip_longest(*schedules, fillvalue=())
    return [Round(tuple(itertools.chain.from_iterable(turn)), alone=False) for turn in turns]


def _groups(outcome: ProbeOutcome) -> switches.SwitchGroups:
    alive = np.array([name not in outcome.lost for name in outcome.nodes])
    return switches.SwitchGroups(switches.distances_of(outcome.matrix()), alive)


def _declared_tree(outcome: ProbeOutcome) -> SwitchTree:
    """Return the switches that the prior declares, else those that Slurm declares. Slurm writes 'top.middle.leaf.node'
    for each node. The tree has no levels if neither declares any."""
    given = switches.declared_tree([outcome.prior.get(name, ()) for name in outcome.nodes], "prior")
    if given.levels:
        return given
    texts = [outcome.joined[name].switches if name in outcome.joined else None for name in outcome.nodes]
    return switches.declared_tree([text.split(".")[:-1] if text else [] for text in texts], "slurm")


def _alive(outcome: ProbeOutcome) -> list[int]:
    return [index for index, name in enumerate(outcome.nodes) if name not in outcome.lost]
