"""The connections of an agent in a simulated tree: the agents' own routing, over connections that may break."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from hpctrain.agent.agreement_messages import AgreementMessage
from hpctrain.agent.peer_messages import HEARTBEAT_S, Announcement
from hpctrain.agent.tree.messages import Detach
from hpctrain.agent.tree.routing import FORWARD_S, TreeRouting
from hpctrain.agent.view import PeerView
from hpctrain.bench.recovery.simulated_parts import SimulatedMesh
from hpctrain.bench.recovery.simulated_world import SimulatedHost

REDIAL_S = 0.5
"""Seconds after which a node that did not answer is dialled again; longer than any answer takes, because an agent never
dials a node twice at a time."""
_NUMBERS = count()


class _Connection(NamedTuple):
    """One end of a connection between two agents."""

    number: int
    """The same at both ends; no other connection has it. So the end of a connection is not taken for the end of the one
    that replaced it."""
    incarnation: str
    """Agent at the other end."""


class SimulatedTree(SimulatedMesh):
    """The connections of one agent to its neighbours in the tree; it stands in for `PeerMesh`."""

    hears_all = False

    def __init__(self, process: SimulatedHost, fan_out: int) -> None:
        super().__init__(process)
        world = process.world
        timeout_s = world.limits.recovery.heartbeat_timeout_s
        self._routing = TreeRouting(process.node, world.nodes, timeout_s, fan_out)
        self._connected: dict[str, _Connection] = {}
        self._over: set[int | str] = set()
        """Numbers of closed connections, and incarnations of ended agents: a connection may end before this side has
        noted it."""
        self._dialled: dict[str, float] = {}
        self._waiting: list[Callable[[], bool]] = []

    @property
    def turn_s(self) -> float:  # type: ignore[override]
        """Longest time until the next turn of the agent, in simulated seconds."""
        return FORWARD_S if self._routing.has_news else HEARTBEAT_S

    @property
    def neighbours(self) -> Collection[str]:
        """The nodes that this one has a connection to."""
        return self._connected.keys()

    def views(self) -> tuple[PeerView, ...]:
        """Return the other agents as last seen."""
        return self._routing.views()

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        """Return (sender, message) for each message of the agreement that has arrived since the last call."""
        return self._routing.take_messages()

    def send(self, nodes: Collection[str], message: AgreementMessage) -> None:
        """Send a message through the tree."""
        for node, part in self._routing.relay(nodes, message):
            self._send(node, part)

    def is_near(self, node: str) -> bool:
        """Return whether there is a connection to a node."""
        return self._routing.is_near(node)

    def take_in(self, node: str, content: Any) -> None:
        """Process a message at once, unless the process is paused; the agent takes its turn if there is news."""
        self._when_awake(lambda: node in self._connected and self._routing.take(self._world.now, node, content))

    def join(self, node: str, connection: _Connection) -> None:
        """Note a new connection, in place of an older one to the same node."""

        def joined() -> bool:
            self._dialled.pop(node, None)
            if not self._over.isdisjoint(connection):
                return False
            replaced = self._connected.get(node)
            if replaced is not None and replaced != connection:
                closed = partial(SimulatedTree.note_end_of, node=self._process.node, number=replaced.number)
                self._reach(node, replaced.incarnation, closed)
            self._connected[node] = connection
            self._routing.joined(self._world.now, node)
            return True

        self._when_awake(joined)

    def note_closed(self, node: str, incarnation: str) -> None:
        """Note that an agent has ended, and with it the connection to it."""
        self._over.add(incarnation)
        connection = self._connected.get(node)
        if connection is not None and connection.incarnation == incarnation:
            self.note_end_of(node, connection.number)

    def note_end_of(self, node: str, number: int, last: Detach | None = None) -> None:
        """Note that another agent has closed a connection, maybe after a last message."""

        def closed() -> bool:
            self._over.add(number)
            connection = self._connected.get(node)
            if connection is None or connection.number != number:
                return False
            if last is not None:
                self._routing.take(self._world.now, node, last)
            del self._connected[node]
            self._routing.closed(node)
            return True

        self._when_awake(closed)

    def exchange(self, now: float, announcement: Announcement, at_once: bool = False) -> None:
        """Take in what arrived during a pause, dial, and send what is due; with `at_once` also a heartbeat that is not
        due yet."""
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()
        for node in self._routing.wanted(now):
            if node not in self._connected and now - self._dialled.get(node, float("-inf")) >= REDIAL_S:
                self._dialled[node] = now
                self._dial(node)
        for node, message in self._routing.outgoing(now, announcement, at_once):
            if not isinstance(message, Detach):
                self._send(node, message)
        for node in self._routing.surplus():
            closed = self._connected.pop(node)
            self._routing.closed(node)
            detach = partial(SimulatedTree.note_end_of, node=self._process.node, number=closed.number, last=Detach())
            self._reach(node, closed.incarnation, detach)

    def _when_awake(self, act: Callable[[], bool]) -> None:
        if not self._process.is_awake:
            self._waiting.append(act)
            self._process.wake()
        elif act():
            self._process.wake()

    def _dial(self, node: str) -> None:
        """Connect to a node, if it is awake and reached."""
        world, process = self._world, self._process

        def answer() -> None:
            other = world.processes.get(node)
            if (
                other is None
                or not other.is_awake
                or frozenset((node, process.node)) in world.links.cut
                or not process.alive
            ):
                return
            number = next(_NUMBERS)
            tree_of(other).join(process.node, _Connection(number, process.incarnation))
            world.at(
                world.chance.uniform(*world.links.delay_s),
                lambda: self.join(node, _Connection(number, other.incarnation)),
            )

        world.at(world.chance.uniform(*world.links.delay_s), answer)

    def _reach(self, node: str, incarnation: str, act: Callable[[SimulatedTree], None]) -> None:
        """Call `act` with the connections of the agent of another node, once a message would reach the node; never if
        the agent is another incarnation by then."""
        world = self._world

        def arrive() -> None:
            other = world.processes.get(node)
            if other is None or other.incarnation != incarnation:
                return
            if frozenset((node, self._process.node)) in world.links.cut:
                world.at(0.5, arrive)
            else:
                act(tree_of(other))

        world.at(world.chance.uniform(*world.links.delay_s), arrive)


def tree_of(process: Any) -> SimulatedTree:
    """Return the connections of the agent of a process, in a world whose agents form a tree."""
    assert isinstance(process.mesh, SimulatedTree), "all processes of a world are in the tree or none is"
    return process.mesh
