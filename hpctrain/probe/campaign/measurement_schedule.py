"""The course of a probe, pure: which rounds come next, given what was measured so far."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.probe.campaign.contention import contention_rounds
from hpctrain.probe.campaign.outliers import standing, suspect_links, suspects
from hpctrain.probe.campaign.prior import contradicts
from hpctrain.probe.campaign.retest_candidates import MOST_LINKS, MOST_SUSPECTS, retest_links, retest_nodes
from hpctrain.probe.measure.clusters import LEAST_NODES, SwitchTree, distances_of, infer_tree, told_tree
from hpctrain.probe.measure.outcome import Outcome
from hpctrain.probe.measure.pair_sampling import ROUNDS_SHARE_MAX, Groups, next_round, sampled_tree
from hpctrain.probe.measure.rounds import Round, plan_rounds, rounds
from hpctrain.probe.measure.settings import ProbeSettings

LEAST_TO_RETEST = 4
"""Nodes: a suspect, a partner, and a good pair beside them."""


def campaign(outcome: Outcome, settings: ProbeSettings) -> Iterator[list[Round]]:
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
    tree = tree_of(outcome, settings)
    if tree.levels and settings.mode != "health":
        yield contention_rounds(tree, _alive(outcome), settings.seed)
    again = _retests(outcome, settings, tree)
    if again:
        yield again


def tree_of(outcome: Outcome, settings: ProbeSettings) -> SwitchTree:
    """The switches, measured where the mode measures enough for it, else as Slurm tells them."""
    told = _told(outcome)
    if settings.loopback or len(outcome.alive) < LEAST_NODES:
        return SwitchTree()
    if settings.mode == "health":
        return told
    if settings.mode == "sampled":
        groups = _groups(outcome)
        return told if told.levels and not contradicts(told, groups) else sampled_tree(groups)
    return infer_tree(distances_of(outcome.matrix()))


def doubts(outcome: Outcome, settings: ProbeSettings, tree: SwitchTree) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes and links that are to be measured again before anything is said of them; the worst first."""
    matrix = outcome.matrix()
    now = standing(matrix, tree)
    nodes = suspects(now, settings.slow_ratio)
    if settings.mode == "health":
        return nodes, []  # too few pairs to tell what a link promises
    known = set(nodes)
    links = [pair for pair in suspect_links(matrix, tree, now, MOST_LINKS + len(nodes)) if not known & set(pair)]
    return nodes, links[:MOST_LINKS]


def _retests(outcome: Outcome, settings: ProbeSettings, tree: SwitchTree) -> list[Round]:
    alive = _alive(outcome)
    if len(alive) < LEAST_TO_RETEST:
        return []
    nodes, links = doubts(outcome, settings, tree)
    good = [node for node in alive if node not in set(nodes)]
    if len(good) < max(LEAST_TO_RETEST - 1, len(nodes)):
        return []  # half of them are suspect: then nobody is
    return retest_nodes(nodes[:MOST_SUSPECTS], good, tree) + retest_links(links, good, tree)


def _first_step(outcome: Outcome, settings: ProbeSettings) -> ProbeSettings:
    """Where the switches were told, random pairs only judge the nodes: the search needs more of them."""
    if settings.mode == "sampled" and _told(outcome).levels:
        return replace(settings, sampled_rounds=settings.health_rounds)
    return settings


def _sample(outcome: Outcome, settings: ProbeSettings) -> Iterator[list[Round]]:
    """Rounds that find out who shares a switch. Where that was told, rounds inside each leaf instead, and further ones
    only when these show that it does not hold."""
    told = _told(outcome)
    if told.levels:
        yield _inside_leaves(told, _alive(outcome), settings.seed)
        if not contradicts(told, _groups(outcome)):
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


def _groups(outcome: Outcome) -> Groups:
    alive = np.array([name not in outcome.lost for name in outcome.nodes])
    return Groups(distances_of(outcome.matrix()), alive)


def _told(outcome: Outcome) -> SwitchTree:
    """What the file says that somebody gave, else what Slurm says: 'top.middle.leaf.node' for each node."""
    given = told_tree([outcome.prior.get(name, ()) for name in outcome.nodes], "prior")
    if given.levels:
        return given
    texts = [outcome.joined[name].switches if name in outcome.joined else None for name in outcome.nodes]
    return told_tree([text.split(".")[:-1] if text else [] for text in texts], "slurm")


def _alive(outcome: Outcome) -> list[int]:
    return [index for index, name in enumerate(outcome.nodes) if name not in outcome.lost]
