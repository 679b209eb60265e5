"""An agent's place in the tree: which agent it connects to, what it tells its neighbours, and how messages reach agents
to which it has no connection. Nothing here touches sockets or reads the clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hpctrain.agent.agreement_messages import AgreementMessage
from hpctrain.agent.peer_messages import HEARTBEAT_S, Announcement
from hpctrain.agent.tree.messages import MAX_HOPS, Detach, Relayed, TreeSummary
from hpctrain.agent.tree.order import FAN_OUT, upstream_order
from hpctrain.agent.tree.table import PeerTable
from hpctrain.agent.view import PeerView

FORWARD_S = 0.02
"""Shortest time between two summaries that pass on news, in seconds. So an agent with many neighbours passes on the
news of many of them in one summary."""
INDIRECT_S = 2.0
"""Seconds by which the heartbeats of an agent that is no neighbour may be late: the summaries on their way wait for a
heartbeat, and agents below a lost one take time to find another upstream. That a neighbour is lost is passed on at
once."""
ATTEMPTS = 3
"""Most agents that an agent without an upstream tries at a time."""
ATTACH_S = 0.5
"""Seconds after which an agent that has not answered is passed over."""
PASS_OVER_S = 2.0
"""Seconds for which an agent is passed over the first time; the time doubles with each further time, up to
`PASS_OVER_MAX_S`."""
PASS_OVER_MAX_S = 30.0
SETTLE_S = 3.0
"""Seconds for which one and the same living agent must be ahead of the upstream in the order; then it becomes the
upstream."""

TreeMessage = TreeSummary | Relayed | Detach


@dataclass
class Neighbour:
    """An agent that this agent has a connection to."""

    since: float
    """When the connection was made, in seconds of the clock."""
    heard: float
    """When the neighbour's last message arrived, in seconds of the clock."""
    is_fresh: bool = True
    """Whether this agent has sent the neighbour no summary yet."""
    leaves: bool = False
    """Whether one of the two agents closes the connection without being lost (`Detach`)."""
    wanted: set[int] = field(default_factory=set)
    """Indices of the agents whose identities the neighbour has asked for."""
    missing: tuple[int, ...] = ()
    """Indices of the agents whose identities this agent is to ask the neighbour for."""


class TreeRouting:
    """The neighbours of one agent in the tree, and the messages that pass through this agent.

    An agent connects to the first living agent in its `upstream_order`, its upstream; agents with higher indices
    connect to it. So the connections of all living agents are a tree if each agent knows which agents live. An agent
    that loses its upstream chooses the next one by itself. An agent without an upstream keeps trying all agents with
    lower indices.
    """

    def __init__(self, me: str, nodes: Sequence[str], timeout_s: float, fan_out: int = FAN_OUT) -> None:
        """Begin without connections.

        Args:
            nodes: all nodes of the job, in order.
            timeout_s: seconds of silence after which a neighbour counts as lost.
            fan_out: as of `upstream_order`.
        """
        self._nodes = nodes
        self._indices = {node: index for index, node in enumerate(nodes)}
        self._me = self._indices[me]
        self._timeout_s = timeout_s
        self._order = {index: place for place, index in enumerate(upstream_order(self._me, fan_out))}
        self._table = PeerTable(me, nodes)
        self._neighbours: dict[int, Neighbour] = {}
        self._upstream: int | None = None
        self._tried: dict[int, float] = {}
        self._better: tuple[int, float] | None = None
        self._passed_over: dict[int, tuple[float, float]] = {}
        self._surplus: list[int] = []
        self._outbox: list[tuple[int, TreeMessage]] = []
        self._messages: list[tuple[str, AgreementMessage]] = []
        self._last_beat = self._last_sent = float("-inf")
        self.has_news = False
        """Whether something is to be passed on after `FORWARD_S`."""

    def views(self) -> tuple[PeerView, ...]:
        """Return the other agents as last seen, in node order."""
        return self._table.views({index: each.since for index, each in self._neighbours.items()}, INDIRECT_S)

    def is_near(self, node: str) -> bool:
        """Return whether this agent has a connection to the agent of a node."""
        return self._indices[node] in self._neighbours

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        """Return (node of the origin, message) for each message of the agreement that has reached this agent since the
        last call."""
        messages, self._messages = self._messages, []
        return messages

    def wanted(self, now: float) -> list[str]:
        """Return the nodes to connect to.

        Args:
            now: seconds of the clock.
        """
        upstream = self._upstream if self._is_heard(now, self._upstream) else None
        living = (index for index in self._order if index == upstream or self._may_serve(now, index))
        best = list(islice(living, ATTEMPTS))
        if not best:
            # The lowest of those that hear each other: others may be back, or on the other side of a cut.
            self._tried = {}
            return [self._nodes[index] for index in self._order if index not in self._neighbours]
        if upstream is not None:
            best = best[:1]
            self._better = (best[0], now) if self._better is None or self._better[0] != best[0] else self._better
            if best[0] == upstream or now - self._better[1] < SETTLE_S:
                self._tried = {}
                return []
        self._tried = {index: self._tried.get(index, now) for index in best}
        silent = [index for index, since in self._tried.items() if now - since >= ATTACH_S]
        for index in silent:
            pause_s = min(2 * self._passed_over.get(index, (0.0, PASS_OVER_S / 2))[1], PASS_OVER_MAX_S)
            self._passed_over[index] = now + pause_s, pause_s
        return self.wanted(now) if silent else [self._nodes[index] for index in best]

    def _may_serve(self, now: float, index: int) -> bool:
        """Return whether an agent with a lower index may be living, so that this agent tries to connect to it."""
        entry = self._table.entries[index]
        if now < self._passed_over.get(index, (float("-inf"), 0.0))[0] or entry.lost:
            return False
        return entry.beat == 0 or now - entry.seen <= self._timeout_s + INDIRECT_S

    def _is_heard(self, now: float, index: int | None) -> bool:
        neighbour = None if index is None else self._neighbours.get(index)
        return neighbour is not None and now - neighbour.heard <= self._timeout_s

    def joined(self, now: float, node: str) -> None:
        """Note a new connection, in place of an older one to the same node.

        Args:
            now: seconds of the clock.
        """
        index = self._indices[node]
        self._neighbours[index] = Neighbour(now, now)
        if index > self._me:
            return
        # Whoever is at the other end now may have said nothing of it, and not know what others take for its heartbeat.
        for entry in self._table.entries:
            entry.via = None if entry.via == index else entry.via
        old = self._upstream
        self._passed_over.pop(index, None)
        if old is not None and old != index and self._is_heard(now, old) and self._order[old] < self._order[index]:
            self._surplus.append(index)
            return
        self._upstream, self._better = index, None
        if old is not None and old != index:
            self._surplus.append(old)

    def closed(self, node: str) -> None:
        """Note that the connection to a node is closed. Its agent counts as lost, unless one of the two agents closed
        the connection on purpose (`Detach`)."""
        index = self._indices[node]
        neighbour = self._neighbours.pop(index, None)
        if index == self._upstream:
            self._upstream = None
        if neighbour is not None and not neighbour.leaves:
            self.has_news |= self._table.mark_lost(index)

    def surplus(self) -> list[str]:
        """Return the nodes whose connections are to be closed now, after the messages that `outgoing` has returned were
        sent."""
        surplus, self._surplus = self._surplus, []
        there = [index for index in surplus if index in self._neighbours and index != self._upstream]
        for index in there:
            self._neighbours[index].leaves = True
        return [self._nodes[index] for index in there]

    def take(self, now: float, node: str, message: TreeMessage) -> bool:
        """Process a message of a neighbour. Return whether it says something new.

        Args:
            now: seconds of the clock.
        """
        sender = self._indices[node]
        neighbour = self._neighbours.get(sender)
        if neighbour is None:
            return False
        neighbour.heard = now
        if isinstance(message, Detach):
            neighbour.leaves = True
        elif isinstance(message, Relayed):
            self._take_relayed(sender, message)
        else:
            news, missing = self._table.merge(now, sender, message)
            neighbour.missing = tuple(missing)
            neighbour.wanted.update(message.asks)
            self.has_news |= news
            return news or bool(missing or message.asks)
        return True

    def _take_relayed(self, sender: int, message: Relayed) -> None:
        if message.origin >= len(self._nodes):
            return
        if self._me in message.targets:
            self._messages.append((self._nodes[message.origin], message.message))
        if message.hops < MAX_HOPS and len(message.targets) > (self._me in message.targets):
            onwards = message.model_copy(update={"hops": message.hops + 1})
            self._outbox.extend((hop, part) for hop, part in self._parts(onwards) if hop != sender)

    def relay(self, nodes: Collection[str], message: AgreementMessage) -> list[tuple[str, Relayed]]:
        """Return (neighbour, message) of what is to be sent so that a message of this agent reaches the agents of
        `nodes`. For an agent that no neighbour has told of, the upstream gets the message; without an upstream, it is
        lost."""
        targets = tuple(self._indices[node] for node in nodes if node in self._indices)
        content: Any = message
        whole = Relayed.model_construct(origin=self._me, targets=targets, hops=0, message=content)
        return [(self._nodes[hop], part) for hop, part in self._parts(whole)]

    def _parts(self, message: Relayed) -> list[tuple[int, Relayed]]:
        """Return (neighbour, the message with the targets on its side) for each neighbour on the way to a target."""
        hops: dict[int, list[int]] = {}
        for target in message.targets:
            known = target < len(self._nodes) and target != self._me
            hop = target if target in self._neighbours else self._table.entries[target].via if known else None
            # An agent that has just changed its upstream may not have heard of the target from it yet.
            hop = hop if hop in self._neighbours else self._upstream
            if hop is not None and known:
                hops.setdefault(hop, []).append(target)
        return [(hop, message.model_copy(update={"targets": tuple(part)})) for hop, part in hops.items()]

    def outgoing(self, now: float, announcement: Announcement, at_once: bool) -> list[tuple[str, TreeMessage]]:
        """Return (neighbour, message) of what is to be sent now: messages that this agent passes on, and summaries if a
        heartbeat is due or something is new.

        Args:
            now: seconds of the clock.
            announcement: what this agent announces.
            at_once: whether to send a summary to all neighbours even if no heartbeat is due.
        """
        for index, neighbour in self._neighbours.items():
            # Its newest heartbeat may have come from another neighbour, while nobody reads this connection any more.
            heard = max(neighbour.heard, self._table.entries[index].seen)
            if now - heard > self._timeout_s:
                self.has_news |= self._table.mark_lost(index)
        outbox, self._outbox = self._outbox, []
        due = at_once or now - self._last_beat >= HEARTBEAT_S
        everybody = due or (self.has_news and now - self._last_sent >= FORWARD_S)
        eager = {i for i, n in self._neighbours.items() if everybody or n.is_fresh or n.wanted or n.missing}
        if eager:
            outbox += self._summaries(announcement, sorted(eager))
        if everybody:
            self._last_sent, self.has_news = now, False
            self._last_beat = now if due else self._last_beat
        outbox += [(index, Detach()) for index in self._surplus if index in self._neighbours]
        return [(self._nodes[index], message) for index, message in outbox if index in self._neighbours]

    def _summaries(self, announcement: Announcement, indices: Sequence[int]) -> list[tuple[int, TreeMessage]]:
        self._table.beat(announcement)
        # To the upstream only what it has not said itself; the same to all others.
        upwards = self._table.summary(without=self._upstream) if self._upstream in indices else None
        downwards = self._table.summary() if any(index != self._upstream for index in indices) else None
        summaries: list[tuple[int, TreeMessage]] = []
        for index in indices:
            neighbour, summary = self._neighbours[index], upwards if index == self._upstream else downwards
            assert summary is not None, "it was made above"
            if neighbour.wanted or neighbour.missing:
                identities = (*summary.identities, *self._table.identities(sorted(neighbour.wanted)))
                summary = summary.model_copy(update={"identities": identities, "asks": neighbour.missing})
            neighbour.wanted, neighbour.missing, neighbour.is_fresh = set(), (), False
            summaries.append((index, summary))
        return summaries
