"""The agents of a large job, in a tree: how long they take to agree on a generation after the loss of a node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.agent.tree.order import FAN_OUT
from hpctrain.bench.recovery.simulated_cluster import SimulatedCluster
from hpctrain.bench.recovery.simulated_tree import tree_of
from hpctrain.bench.recovery.simulated_world import InvariantViolation

LINK_S = 0.0002
"""Delay of each message on a connection, in seconds."""
TURN_S = 0.002
"""Simulated seconds of an agent's turn: about what a turn really takes if the agent has views of 1,000 others."""
MAKE_S = 0.0
"""Simulated seconds to make a record. In a run, this time depends on the planner and on the state to restore."""
LIMIT_S = 30.0


@dataclass
class LargeJobRow:
    """The loss of one node of a large job. Its agent is killed, and its connections close."""

    case: str
    """Which node was lost: 'node below', 'head of a block' or 'lowest node'."""
    agents: int
    """Agents before the loss."""
    fan_out: int
    decided_s: float
    """Simulated seconds from the loss until the first agent knew that the next generation is agreed on."""
    entered_s: float
    """Simulated seconds from the loss until all other agents had entered it."""
    turns: int
    """Turns of all agents from the loss until all others had entered the next generation."""
    messages: int
    """Messages between agents; a relayed message counts on each of its connections."""
    neighbours: int
    """Most connections that an agent had, after the loss."""
    wall_s: float
    """Seconds that the simulation took."""


def measure_large_job(agents: int, fan_out: int = FAN_OUT) -> list[LargeJobRow]:
    """Return a row for each lost node: the last one, which has one connection, then the first of the second block, to
    which the others of its block are connected, then the first of all.

    Args:
        agents: how many agents there are.
        fan_out: fan-out of the tree.

    Raises:
        InvariantViolation: the agents broke a rule, or began no next generation within `LIMIT_S`.
    """
    cluster = SimulatedCluster(agents, seed=1, fan_out=fan_out)
    cluster.links.delay_s, cluster.make_s, cluster.busy_s = (LINK_S, LINK_S), (MAKE_S, MAKE_S), TURN_S
    for node in cluster.nodes:
        cluster.start(node)
    everybody = set(cluster.nodes)
    cluster.run(LIMIT_S, lambda: cluster.is_training(everybody))
    return list(_losses(cluster, fan_out))


def _losses(cluster: SimulatedCluster, fan_out: int) -> Iterator[LargeJobRow]:
    cases = {"node below": len(cluster.nodes) - 1, "head of a block": fan_out, "lowest node": 0}
    for number, (case, index) in enumerate(cases.items(), 1):
        # The agents come to rest before the next loss.
        cluster.run(cluster.now + 1.0)
        wall, begin, turns, messages = time.perf_counter(), cluster.now, cluster.turns, cluster.messages
        before = len(cluster.processes)
        cluster.kill(cluster.nodes[index])
        rest = set(cluster.processes)
        cluster.run(begin + LIMIT_S, lambda rest=rest: cluster.is_training(rest))  # type: ignore[misc]
        if max(cluster.records, default=-1) != number or not cluster.is_training(rest):
            raise InvariantViolation(f"{len(rest)} agents have not agreed on generation {number}: {cluster.exits}")
        yield LargeJobRow(
            case, before, fan_out, cluster.decided_at[number] - begin, cluster.now - begin, cluster.turns - turns,
            cluster.messages - messages, max(len(tree_of(each).neighbours) for each in cluster.processes.values()),
            time.perf_counter() - wall,
        )  # fmt: skip
