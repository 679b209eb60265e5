"""Random schedules of faults for the simulated cluster, one for each seed.

In a schedule of the kind `majority`, more than half of the nodes are never killed and never cut off from each other,
and pause only briefly: these nodes must train in the end. In one of the kind `half`, some or all nodes of one half die,
and the nodes of the other half must train in the end. In one of the kind `any`, every node may be disturbed in every
way, and no node has to train. The rules of `simulated_world` must hold in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.agent.agreement_messages import Accepted, AcceptRequest, Decided, Prepare, Promise
from hpctrain.bench.recovery.simulated_cluster import SimulatedCluster
from hpctrain.bench.recovery.simulated_world import HEARTBEAT_TIMEOUT_S, InvariantViolation

KINDS = ("majority", "half", "any")
TREE_NODES = 4
"""Fewest nodes of a schedule whose agents may form a tree. A tree of a run has more nodes and a higher fan-out."""
TREE_FAN_OUT = 2
SETTLE_S = 120.0
"""Simulated seconds after the end of the disturbances within which the nodes that must train have to begin: workers
that die at their start may end seven more generations, and a record takes up to 8 s to make."""
START_S = 30.0
MESSAGE_KINDS = (Prepare, Promise, AcceptRequest, AcceptRequest, Accepted, Decided)


@dataclass
class ScheduleOutcome:
    """The result of a schedule in which no rule was broken."""

    seed: int
    kind: str
    nodes: int
    in_tree: bool
    """Whether the agents formed a tree; else each pair had a connection."""
    faults: list[str] = field(default_factory=list)
    """The faults in order: simulated second, what and where."""
    generations: int = 0
    """Number of generations that agents entered or published."""
    settled_s: float | None = None
    """Simulated seconds from the end of the disturbances until all nodes that must train did; None in a schedule of the
    kind `any`."""
    simulated_s: float = 0.0
    """Simulated seconds of the whole schedule."""
    turns: int = 0
    """Turns of all agents."""
    messages: int = 0
    """Messages between agents, heartbeats included."""


def run_seed(seed: int) -> ScheduleOutcome:
    """Run the schedule of a seed, and return its outcome.

    Raises:
        InvariantViolation: a rule was broken; the message names the faults of the schedule.
    """
    return _RandomSchedule(seed).run()


class _RandomSchedule:
    """The schedule of one seed."""

    def __init__(self, seed: int) -> None:
        self._cluster = cluster = SimulatedCluster(1, seed)
        self._chance = chance = cluster.chance
        count = chance.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 6))
        kind = chance.choices(KINDS, (5, 1, 4))[0]
        if count < 2 or (kind == "half" and count % 2):
            kind = "any"
        fan_out = TREE_FAN_OUT if count >= TREE_NODES and seed % 2 else None
        count += 0 if fan_out is None else chance.choice((0, 0, 2, 4))
        spares = chance.choice((0, 0, 0, 1, 2))
        self._cluster = cluster = SimulatedCluster(count, seed, spares=spares, fan_out=fan_out)
        self._chance = chance = cluster.chance
        cluster.links.loss = chance.choice((0.0, 0.0, 0.05, 0.3))
        cluster.links.repeats = chance.choice((0.0, 0.1, 0.5))
        cluster.links.delay_s = chance.choice(((0.0001, 0.002), (0.0001, 0.05), (0.01, 0.2)))
        cluster.make_s = chance.choice(((0.001, 0.02), (0.05, 0.5), (0.5, 3.0), (2.0, 8.0)))
        cluster.disk.delay_s = chance.choice(((0.0005, 0.005), (0.001, 0.1), (0.1, 0.6)))
        nodes = list(cluster.nodes)
        chance.shuffle(nodes)
        core = count // 2 + 1 if kind == "majority" else count // 2 if kind == "half" else 0
        self._core, self._others = nodes[:core], nodes[core:]
        cluster.links.lossless = frozenset(self._core)
        self._outcome = ScheduleOutcome(seed, kind, count, fan_out is not None)

    def run(self) -> ScheduleOutcome:
        cluster, chance, outcome = self._cluster, self._chance, self._outcome
        try:
            for node in cluster.nodes:
                cluster.at(chance.uniform(0, 0.5), lambda node=node: cluster.start(node))  # type: ignore[misc]
            everybody = set(cluster.nodes)
            cluster.run(START_S, lambda: cluster.is_training(everybody))
            if not cluster.is_training(everybody):
                raise InvariantViolation("the first generation did not begin")
            faults = self._half_dies if outcome.kind == "half" else self._disturb
            for _ in range(chance.randint(1, 3)):
                cluster.run(cluster.now + chance.choice((0.0, 0.02, 0.1, 0.5, 1.0, 3.0)) * chance.random())
                faults()
                cluster.check_old_workers()
            cluster.run(cluster.now + chance.choice((0.0, 1.0, 5.0)))
            self._settle()
        except InvariantViolation as violation:
            story = "; ".join(outcome.faults)
            broken = InvariantViolation(
                f"seed {outcome.seed} ({outcome.kind}, {outcome.nodes} nodes): {violation}; faults: {story}"
            )
            broken.kind = outcome.kind
            raise broken from violation
        outcome.generations, outcome.simulated_s = len(cluster.records), cluster.now
        outcome.turns, outcome.messages = cluster.turns, cluster.messages
        return outcome

    def _settle(self) -> None:
        """End all disturbances but deaths, and let the agents come to rest."""
        cluster, outcome = self._cluster, self._outcome
        cluster.links.cut.clear()
        cluster.links.loss = 0.0
        cluster.disk.hangs_until.clear()
        cluster.disk.fails = ""
        begin, core = cluster.now, set(self._core)
        if not core:
            cluster.run(begin + 3 * HEARTBEAT_TIMEOUT_S)
            cluster.check_old_workers()
            return
        while cluster.now < begin + SETTLE_S:
            cluster.run(cluster.now + 0.5)
            cluster.check_old_workers()
            if cluster.is_training(core):
                # It must last: a generation that names a dead member ends again.
                since, newest = cluster.now, max(cluster.records)
                cluster.run(cluster.now + 1.2 * HEARTBEAT_TIMEOUT_S)
                if cluster.is_training(core) and max(cluster.records) == newest:
                    outcome.settled_s = since - begin
                    return
        exits = {node: code for node, code in cluster.exits.items() if node in core}
        raise InvariantViolation(f"{', '.join(sorted(core))} do not train (ended: {exits or 'none'})")

    def _note(self, what: str) -> None:
        self._outcome.faults.append(f"{self._cluster.now:.3f} {what}")

    def _half_dies(self) -> None:
        """Kill one or two nodes outside of the remaining half, each at once or at one of its next messages. Sometimes
        also stop the workers of a node of that half."""
        if self._others:
            node = self._others.pop()
            if self._chance.random() < 0.5:
                self._kill(node, None)
            else:
                self._at_message(node, None)
                self._cluster.at(1.0, lambda: self._kill(node, None))
        if not self._chance.randrange(3):
            self._stop_workers(self._chance.choice(self._core))
        if len(self._outcome.faults) < 2 and self._others:
            self._half_dies()

    def _disturb(self) -> None:
        chance = self._chance
        anybody = chance.choice(self._cluster.nodes)
        # The first node proposes, so it is disturbed more often than others.
        victim = chance.choice([*self._others, min(self._others), min(self._others)]) if self._others else None
        back_s = chance.choice((None, 0.3, 2.0, 4.0))
        choices: list[Callable[[], None]] = [
            lambda: self._stop_workers(anybody),
            lambda: self._stop_workers(anybody),
            lambda: self._pause(anybody, at_message=chance.random() < 0.5),
            self._change_plan,
            self._hang_files,
            self._fail_files,
        ]
        if victim is not None:
            choices += [
                lambda: self._kill(victim, back_s),
                lambda: self._at_message(victim, back_s),
                lambda: self._at_message(victim, back_s),
                lambda: self._pause(victim, at_message=chance.random() < 0.5),
                self._cut,
                self._cut,
            ]
        chance.choice(choices)()

    def _kill(self, node: str, back_s: float | None) -> None:
        self._note(f"kill {node}" + ("" if back_s is None else f", back after {back_s:g} s"))
        self._cluster.kill(node)
        if back_s is not None:
            self._cluster.at(back_s, lambda: self._cluster.start(node))

    def _at_message(self, node: str, back_s: float | None) -> None:
        """Kill a node at one of its next messages of the agreement, or before it knows the answer of the witness. Start
        its agent again `back_s` + 1 seconds from now; None: never."""
        process = self._cluster.process(node)
        if process is None:
            return
        kind, count = self._chance.choice((*MESSAGE_KINDS, None)), self._chance.randint(1, 5)
        self._note(f"kill {node} at {kind.__name__ if kind else 'call'} {count}")
        if kind is None:
            process.files.dies_after = _countdown(count, lambda result: True)
        else:
            process.killed_at = _countdown(count, lambda content: isinstance(content, kind))
        if self._chance.random() < 0.7:
            self._stop_workers(self._chance.choice(self._core or self._cluster.nodes))
        if back_s is not None:
            self._cluster.at(back_s + 1.0, lambda: self._cluster.start(node))

    def _stop_workers(self, node: str) -> None:
        """Kill the workers of a node, or let them hang."""
        process = self._cluster.process(node)
        if process is None:
            return
        how = self._chance.choice(("die", "die", "hang", "die at start"))
        self._note(f"workers of {node} {how}")
        if how == "hang":
            process.group.hangs_since = self._cluster.now
            return
        process.group.dying_starts = 2 if how == "die at start" else 0
        process.group.die()

    def _change_plan(self) -> None:
        """Let all workers of the newest generation stop for another plan, one shortly after the other. Sometimes, those
        of a node then die first."""
        chance, cluster = self._chance, self._cluster
        newest = max(cluster.records)
        working = cluster.plans[cluster.records[newest].plan].nodes
        self._note("another plan")
        for node in working:
            if (process := cluster.process(node)) is not None:
                cluster.at(chance.uniform(0.0, 0.3), lambda group=process.group: group.leave(newest))  # type: ignore[misc]
        if not chance.randrange(3):
            self._stop_workers(chance.choice(working))

    def _pause(self, node: str, at_message: bool) -> None:
        process = self._cluster.process(node)
        if process is None:
            return
        longest = 0.2 * HEARTBEAT_TIMEOUT_S if node in self._core else 3 * HEARTBEAT_TIMEOUT_S
        seconds = self._chance.uniform(0.05, longest)
        kind, count = self._chance.choice(MESSAGE_KINDS), self._chance.randint(1, 4)
        self._note(f"pause {node} for {seconds:.2f} s" + (f" at {kind.__name__} {count}" if at_message else ""))
        if at_message:
            process.paused_at = _countdown(count, lambda content: isinstance(content, kind)), seconds
            if self._chance.random() < 0.7:
                self._stop_workers(self._chance.choice(self._cluster.nodes))
        else:
            process.pause(seconds)

    def _cut(self) -> None:
        """Cut some nodes off from the others, or two nodes from each other."""
        chance, nodes = self._chance, self._cluster.nodes
        seconds = chance.choice((0.3, 1.5, 4.0, 8.0))
        outside = [node for node in self._others if chance.random() < 0.6] or self._others[:1]
        if chance.random() < 0.3 and len(self._others) > 1:
            pairs = {frozenset(chance.sample(self._others, 2))}
        else:
            pairs = {frozenset((a, b)) for a in outside for b in nodes if b not in outside}
        self._note(f"cut {', '.join(sorted('-'.join(sorted(pair)) for pair in pairs))} for {seconds:g} s")
        self._cluster.links.cut |= pairs
        self._cluster.at(seconds, lambda: self._cluster.links.cut.difference_update(pairs))

    def _hang_files(self) -> None:
        nodes = [node for node in self._cluster.nodes if self._chance.random() < 0.7]
        seconds = self._chance.choice((0.5, 3.0, 10.0))
        self._note(f"files hang on {', '.join(nodes)} for {seconds:g} s")
        for node in nodes:
            self._cluster.disk.hangs_until[node] = self._cluster.now + seconds

    def _fail_files(self) -> None:
        kind = self._chance.choice(("*", "gen-*", "plan-*", "witness-*"))
        self._note(f"{kind} can be neither read nor created")
        self._cluster.disk.fails = kind
        self._cluster.at(self._chance.uniform(0.5, 5), lambda: setattr(self._cluster.disk, "fails", ""))


def _countdown(count: int, counts: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a function to call with one object after the other. The function returns True from the `count`-th object
    on for which `counts` is true, that object included, and False before."""
    left = [count]

    def is_it(content: object) -> bool:
        left[0] -= counts(content)
        return left[0] <= 0

    return is_it
