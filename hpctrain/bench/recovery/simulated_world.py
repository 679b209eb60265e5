"""What a simulated cluster consists of beside its agents: clock, network, shared files, and the rules that must hold.

The rules: no generation has two records; a generation begins only when half or more of the last generation's members
have ended their part of that generation; no generation trains on long after the next one was decided; no agent's loop
uses a file.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.agent.agreement_messages import AgreementMessage
from hpctrain.agent.tree.messages import Relayed
from hpctrain.agent.view import DecisionLimits
from hpctrain.base.errors import StorageError
from hpctrain.records.format.document import Document
from hpctrain.records.history.generation import Generation
from hpctrain.records.run.recovery import Recovery

HEARTBEAT_TIMEOUT_S = 2.0
LIMITS = DecisionLimits(
    Recovery(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, progress_timeout_s=6.0, retries=10**6),
    compiling_timeout_s=6.0,
    join_timeout_s=6.0,
    collect_s=1.0,
    proposer_takeover_s=2.0,
)
"""Limits shorter than those of a run, so that a schedule ends sooner."""


class InvariantViolation(AssertionError):  # noqa: N818 - it names what it is in a report of schedules
    """The agents broke a rule that must hold in every schedule."""

    kind = "any"
    """Kind of the schedule."""


class SimulatedPlan(NamedTuple):
    """The part of a plan that an agent reads."""

    ranks: tuple[Any, ...]
    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def nodes(self) -> list[str]:
        """The nodes with ranks."""
        return [device.node for device in self.ranks]


@dataclass
class SimulatedLinks:
    """What the network does to messages."""

    delay_s: tuple[float, float] = (0.0001, 0.003)
    """Shortest and longest delay of a message; messages overtake each other."""
    loss: float = 0.0
    """Share of the messages of the agreement that are lost."""
    lossless: frozenset[str] = frozenset()
    """Nodes between which no message is lost."""
    repeats: float = 0.0
    """Share of the messages of the agreement that arrive twice, of those that are not lost."""
    cut: set[frozenset[str]] = field(default_factory=set)
    """Pairs of nodes of which neither hears the other."""


@dataclass
class SimulatedDisk:
    """The shared folder, and its faults."""

    files: dict[Path, Document] = field(default_factory=dict)
    hangs_until: dict[str, float] = field(default_factory=dict)
    """Node -> simulated second until which its calls in the thread for files hang. The making of a record does not
    hang; it takes `SimulatedWorld.make_s`."""
    fails: str = ""
    """Pattern of the names of files that can be neither read nor created."""
    delay_s: tuple[float, float] = (0.0005, 0.01)
    """Shortest and longest time, in simulated seconds, from the start of a call that uses files to its effect, and from
    the effect of any call in a thread to its end."""
    in_loop: bool = False
    """Whether the loop of an agent runs now. It may use no file, because every file may hang."""

    def check(self, name: str) -> None:
        """Check that the file `name` can be read and created.

        Raises:
            StorageError: it cannot.
            InvariantViolation: the loop of an agent uses it.
        """
        if self.in_loop:
            raise InvariantViolation(f"the agent's loop uses the file {name}")
        if fnmatch(name, self.fails):
            raise StorageError(f"{name}: Input/output error")


class SimulatedWorld:
    """Clock, network and files of one schedule, and the processes that use them."""

    def __init__(
        self, count: int, seed: int, spares: int = 0, limits: DecisionLimits = LIMITS, fan_out: int | None = None
    ) -> None:
        """Make `count` nodes without agents.

        Args:
            spares: members of each generation without a rank; fewer if a generation has too few members, of which at
                least one has a rank.
            fan_out: fan-out of the tree that the agents form; None: each pair of agents has a connection.
        """
        self.fan_out = fan_out
        self.nodes = tuple(f"n{index}" for index in range(count))
        self.chance = random.Random(seed)
        self.limits = limits
        self.spares = spares
        self.now = 0.0
        self.links = SimulatedLinks()
        self.disk = SimulatedDisk()
        self.make_s = (0.01, 0.1)
        """Shortest and longest time to make a record, in simulated seconds."""
        self.busy_s = 0.0
        """How long a turn of an agent takes."""
        self.processes: dict[str, SimulatedHost] = {}
        self.plans: dict[str, SimulatedPlan] = {}
        self.records: dict[int, Generation] = {}
        """Number -> the record of that generation, as the first agent that entered or published it knows it."""
        self.decided_at: dict[int, float] = {}
        """Number -> simulated second at which the first agent entered or published that record."""
        self.begun: dict[int, set[str]] = {}
        """Number of a generation -> incarnations of the agents that have entered it."""
        self.ended: dict[int, set[str]] = {}
        """Number of a generation -> incarnations of the agents that have entered it and ended their part of it."""
        self.exits: dict[str, int] = {}
        """Node -> exit code of its agent that left."""
        self.turns = 0
        self.messages = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` after `delay_s` simulated seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, act))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let the time pass until the simulated second `until`, or until `stop` returns True after an event."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
            if stop():
                return
        self.now = max(self.now, until)

    def deliver(self, sender: str, receiver: str, content: object, late_s: float) -> None:
        """Bring a message to the agent of another node, `late_s` seconds and a random delay later, or lose the
        message."""
        self.messages += 1
        urgent = isinstance(content, AgreementMessage | Relayed)
        copies = 1
        if urgent and self.links.loss and self.chance.random() < self.links.loss:
            copies = int({sender, receiver} <= self.links.lossless)
        elif urgent and self.links.repeats and self.chance.random() < self.links.repeats:
            copies = 2

        def arrive() -> None:
            process = self.processes.get(receiver)
            if process is not None and frozenset((sender, receiver)) not in self.links.cut:
                process.take_in(sender, content)

        for _ in range(copies):
            self.at(late_s + self.chance.uniform(*self.links.delay_s), arrive)

    def note_record(self, record: Generation) -> None:
        """Check a record that an agent entered or published against the rules.

        Raises:
            InvariantViolation: a rule does not hold.
        """
        known = self.records.setdefault(record.number, record)
        if known is not record and known != record:
            raise InvariantViolation(f"generation {record.number} has two records: {known} and {record}")
        if record.number in self.decided_at:
            return
        self.decided_at[record.number] = self.now
        last = self.records.get(record.number - 1)
        if last is not None:
            members = {member.incarnation for member in last.members}
            over = len(members & self.ended.get(last.number, set()))
            if 2 * over < len(members):
                raise InvariantViolation(
                    f"generation {record.number} begins, and only {over} of {len(members)} members have ended the last"
                )

    def check_old_workers(self) -> None:
        """Check that no generation trains 3 heartbeat timeouts after the next one was decided. A generation trains if
        the workers of all its nodes run and no process of an agent there is paused.

        Raises:
            InvariantViolation: a generation does.
        """
        for number, record in self.records.items():
            decided = self.decided_at.get(number + 1)
            if decided is None or self.now - decided < 3 * HEARTBEAT_TIMEOUT_S:
                continue
            working = self.plans[record.plan].nodes
            at_work = [self.processes.get(node) for node in working]
            if all(p is not None and p.training == number and p.is_awake for p in at_work):
                raise InvariantViolation(f"generation {number} trains on, and {number + 1} was decided at {decided:g}")


class SimulatedHost:
    """A process on a node, as far as the world knows it."""

    def __init__(self, world: SimulatedWorld, node: str, incarnation: str) -> None:
        self.world = world
        self.node = node
        self.incarnation = incarnation
        self.alive = True
        self.generation = -1
        """The generation that the process's agent has entered; -1 before the first one."""
        self.training: int | None = None
        """The generation whose workers run here; None without workers."""
        self.paused_until = 0.0
        self.killed_at: Callable[[object], bool] | None = None
        """Called with each message before it is sent; if it returns True, the process is killed and the message not
        sent."""
        self.paused_at: tuple[Callable[[object], bool], float] | None = None
        """A function and seconds. The function is called with each message before it is sent; if it returns True, the
        process is paused for these seconds, and the turn's messages from this one on are sent after the pause."""
        self._turn_at = float("inf")
        self._busy_until = 0.0

    def now(self) -> float:
        """Return the seconds of the simulated clock."""
        return self.world.now

    def wall(self) -> float:
        """Return the same as `now`."""
        return self.world.now

    def sleep(self, seconds: float) -> None:
        """Never called: an agent that is driven turn by turn does not sleep."""
        raise AssertionError(f"it sleeps {seconds} s")

    @property
    def is_awake(self) -> bool:
        """Whether the process runs."""
        return self.alive and self.world.now >= self.paused_until

    def pause(self, seconds: float) -> None:
        """Stop the process for a time, as SIGSTOP does."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def wake(self, delay_s: float = 0.0) -> None:
        """Let the agent take its next turn after `delay_s` at the latest."""
        delay_s = max(delay_s, self.paused_until - self.world.now, self._busy_until - self.world.now)
        due = self.world.now + delay_s  # as `at` computes it: `_take_turn` compares the two
        if due < self._turn_at:
            self._turn_at = due
            self.world.at(delay_s, self._take_turn)

    def note_entered(self, record: Generation) -> None:
        """Note that this process's agent has entered a generation.

        Raises:
            InvariantViolation: the generation's record breaks a rule.
        """
        self.world.note_record(record)
        self.generation = record.number
        self.world.begun.setdefault(record.number, set()).add(self.incarnation)

    def note_end(self) -> None:
        """Note that this agent's part of every generation that it has entered is over."""
        for number, agents in self.world.begun.items():
            if self.incarnation in agents:
                self.world.ended.setdefault(number, set()).add(self.incarnation)

    def take_in(self, node: str, content: object) -> None:
        """Keep a message for the agent's next turn."""
        raise AssertionError("a process takes messages in")

    def note_closed(self, node: str, incarnation: str) -> None:
        """Note that the connection to an agent has closed."""
        raise AssertionError("a process notices")

    def take_turn(self) -> None:
        """Let the agent take a turn, and come back for the next one."""
        raise AssertionError("a process takes turns")

    def die(self) -> None:
        """End at once, with all workers."""
        raise AssertionError("a process can be killed")

    def _take_turn(self) -> None:
        if not self.alive or self.world.now < self._turn_at:
            return
        self._turn_at = float("inf")
        if self.is_awake:
            self._busy_until = self.world.now + self.world.busy_s
            self.take_turn()
        else:
            self.wake()
