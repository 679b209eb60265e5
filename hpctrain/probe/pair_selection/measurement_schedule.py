"""The course of a probe, pure: which rounds come next, given what was measured so far."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.probe.measure.clusters import MIN_NODES_FOR_TREE, SwitchTree, declared_tree, distances_of, infer_tree
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.pair_sampling import ROUNDS_SHARE_MAX, SwitchGroups, next_round, sampled_tree
from hpctrain.probe.measure.rounds import Round, plan_rounds, rounds
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.contention import contention_rounds
from hpctrain.probe.pair_selection.outliers import relative_performance, suspect_links, suspects
from hpctrain.probe.pair_selection.prior import contradicts
from hpctrain.probe.pair_selection.retests import MAX_LINKS, MAX_SUSPECTS, retest_links, retest_nodes

MIN_NODES_TO_RETEST = 4
"""Nodes: a suspect, a partner, and a good pair beside them."""


def measurement_schedule(outcome: ProbeOutcome, settings: ProbeSettings) -> Iterator[list[Round]]:
    """The rounds to run, a step at a time; each step is decided when the one before is in the outcome.

    First the rounds of the mode; in the mode sampled, further ones until it is known which nodes share a switch; then,
    unless only health is asked for, what each level of switches carries; then the suspects once more. Virtual nodes of
    one machine have no switches and differ by chance: for them the first step is all.
    """
    yield plan_rounds(len(outcome.nodes), _first_step(outcome, settings))
    if settings.loopback:
        return
    if settings.mode == "sampled":
        yield from _sample(outcome, settings)
    tree = switch_tree(outcome, settings)
    if tree.levels and settings.mode != "health":
        yield contention_rounds(tree, _alive(outcome), settings.seed)
    again = _retests(outcome, settings, tree)
    if again:
        yield again


def switch_tree(outcome: ProbeOutcome, settings: ProbeSettings) -> SwitchTree:
    """The switches, measured where the mode measures enough for it, else as Slurm tells them."""
    declared = _declared_tree(outcome)
    if settings.loopback or len(outcome.alive) < MIN_NODES_FOR_TREE:
        return SwitchTree()
    if settings.mode == "health":
        return declared
    if settings.mode == "sampled":
        groups = _groups(outcome)
        return declared if declared.levels and not contradicts(declared, groups) else sampled_tree(groups)
    return infer_tree(distances_of(outcome.matrix()))


def retest_candidates(
    outcome: ProbeOutcome, settings: ProbeSettings, tree: SwitchTree
) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes and links that are to be measured again before anything is said of them; the worst first."""
    matrix = outcome.matrix()
    now = relative_performance(matrix, tree)
    nodes = suspects(now, settings.slow_ratio)
    if settings.mode == "health":
        return nodes, []  # too few pairs to tell what a link promises
    known = set(nodes)
    links = [pair for pair in suspect_links(matrix, tree, now, MAX_LINKS + len(nodes)) if not known & set(pair)]
    return nodes, links[:MAX_LINKS]


def _retests(outcome: ProbeOutcome, settings: ProbeSettings, tree: SwitchTree) -> list[Round]:
    alive = _alive(outcome)
    if len(alive) < MIN_NODES_TO_RETEST:
        return []
    nodes, links = retest_candidates(outcome, settings, tree)
    good = [node for node in alive if node not in set(nodes)]
    if len(good) < max(MIN_NODES_TO_RETEST - 1, len(nodes)):
        return []  # half of them are suspect: then nobody is
    return retest_nodes(nodes[:MAX_SUSPECTS], good, tree) + retest_links(links, good, tree)


def _first_step(outcome: ProbeOutcome, settings: ProbeSettings) -> ProbeSettings:
    """Where the switches were told, random pairs only judge the nodes: the search needs more of them."""
    if settings.mode == "sampled" and _declared_tree(outcome).levels:
        return replace(settings, sampled_rounds=settings.health_rounds)
    return settings


def _sample(outcome: ProbeOutcome, settings: ProbeSettings) -> Iterator[list[Round]]:
    """Rounds that find out who shares a switch. Where that was told, rounds inside each leaf instead, and further ones
    only when these show that it does not hold."""
    declared = _declared_tree(outcome)
    if declared.levels:
        yield _inside_leaves(declared, _alive(outcome), settings.seed)
        if not contradicts(declared, _groups(outcome)):
            return
    rng = random.Random(settings.seed)
    for _ in range(int(ROUNDS_SHARE_MAX * len(outcome.nodes)) - settings.sampled_rounds):
        groups = _groups(outcome)
        met = next_round(groups, rng) if groups.near_below is not None else []
        if not met:
            return
        yield [Round(tuple(met), alone=False)]


def _inside_leaves(tree: SwitchTree, alive: Sequence[int], seed: int) -> list[Round]:
    """Every pair of every leaf, all leaves at the same time."""
    members: dict[int, list[int]] = {}
    for node in alive:
        members.setdefault(int(tree.levels[0][node]), []).append(node)
    schedules = [
        [[(nodes[a], nodes[b]) for a, b in met] for met in rounds(len(nodes), seed)]
        for label, nodes in members.items()
        if label >= 0
    ]
    longest = max((len(schedule) for schedule in schedules), default=0)
    return [
        Round(tuple(pair for schedule in schedules if turn < len(schedule) for pair in schedule[turn]), alone=False)
        for turn in range(longest)
    ]


def _groups(outcome: ProbeOutcome) -> SwitchGroups:
    alive = np.array([name not in outcome.lost for name in outcome.nodes])
    return SwitchGroups(distances_of(outcome.matrix()), alive)


def _declared_tree(outcome: ProbeOutcome) -> SwitchTree:
    """What the file says that somebody gave, else what Slurm says: 'top.middle.leaf.node' for each node."""
    given = declared_tree([outcome.prior.get(name, ()) for name in outcome.nodes], "prior")
    if given.levels:
        return given
    texts = [outcome.joined[name].switches if name in outcome.joined else None for name in outcome.nodes]
    return declared_tree([text.split(".")[:-1] if text else [] for text in texts], "slurm")


def _alive(outcome: ProbeOutcome) -> list[int]:
    return [index for index, name in enumerate(outcome.nodes) if name not in outcome.lost]
