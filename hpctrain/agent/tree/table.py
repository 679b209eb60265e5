"""What one agent of a tree knows of all agents: the newest heartbeat of each, the neighbour from which it came, and
what is new."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.tree.messages import STATE_REASON_CHARS, Identity, Row, State, TreeSummary
from hpctrain.agent.view import PeerView

MAX_DOING = 32
"""Most agents, besides the sender, whose workers' activity a summary has."""


@dataclass(slots=True)
class Entry:
    """What an agent knows of the agent of one node, maybe of itself."""

    view: PeerView
    identity: Identity | None = None
    beat: int = 0
    """Count of the agent's newest heartbeat; 0 before the first one."""
    lost: bool = False
    """Whether a neighbour of the agent lost it after its newest heartbeat."""
    state: State | None = None
    via: int | None = None
    """Index of the neighbour from whose connection the newest heartbeat came; None before the first one, and if an
    upstream has another connection since."""
    seen: float = float("-inf")
    """When the newest heartbeat came, in seconds of this agent's clock."""

    @property
    def since(self) -> int:
        """`since` of the agent's identity; 0 if the identity is not known."""
        return 0 if self.identity is None else self.identity.since


class PeerTable:
    """The newest heartbeats of all agents that one agent knows.

    Agents exchange them with their neighbours only, so on each connection on its way a heartbeat may wait for the next
    summary. Of two heartbeats of an agent, the one with the higher count is newer, whichever neighbour sent it; so it
    does no harm if a heartbeat comes twice or in a loop.
    """

    def __init__(self, me: str, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._me = nodes.index(me)
        self.entries = [Entry(PeerView(node)) for node in nodes]
        self._views: tuple[PeerView, ...] | None = None

    @property
    def itself(self) -> Entry:
        """What this agent knows of itself."""
        return self.entries[self._me]

    def beat(self, announcement: Announcement) -> None:
        """Count a heartbeat of this agent, and note what the agent announces."""
        entry = self.itself
        # Agents of one node, one after the other, begin at different counts, so that none is taken for another.
        entry.beat = 1 + (entry.beat or zlib.crc32(announcement.incarnation.encode()) >> 8)
        entry.lost = False
        entry.state = State(
            announcement.generation, announcement.phase, announcement.reason[:STATE_REASON_CHARS], announcement.doing
        )
        who = (announcement.incarnation, announcement.addr, announcement.store_port)
        if entry.identity is None or _who(entry.identity) != who:
            entry.identity = Identity(
                index=self._me, since=entry.beat, incarnation=who[0], addr=who[1], store_port=who[2]
            )  # fmt: skip

    def merge(self, now: float, sender: int, summary: TreeSummary) -> tuple[bool, list[int]]:
        """Take over what is newer in the summary of a neighbour. Return whether an agent has another state or identity
        than before, or is lost or back, and the indices of the agents whose identities are missing.

        Args:
            now: seconds of the clock.
            sender: index of the neighbour.
        """
        news = False
        for identity in summary.identities:
            if identity.index < len(self.entries) and identity.index != self._me:
                entry = self.entries[identity.index]
                if identity.since > entry.since:
                    entry.identity, entry.beat, entry.lost, news = identity, 0, False, True
        missing = []
        entries, states = self.entries, summary.states
        for index, since, beat, place in summary.rows:
            if index >= len(entries):
                continue
            entry = entries[index]
            if index == self._me:
                self._outlive(since, abs(beat))
                continue
            if since != entry.since:
                if since > entry.since:
                    missing.append(index)
                continue
            lost, life = beat < 0, abs(beat)
            if life < entry.beat or (life == entry.beat and (entry.lost or not lost)):
                continue
            state = states[place]
            news |= lost != entry.lost or state != entry.state
            if life > entry.beat:
                entry.beat, entry.state, entry.via, entry.seen = life, state, sender, now
            entry.lost = lost
        self._views = None
        return news, missing

    def mark_lost(self, index: int) -> bool:
        """Note that this agent has lost a neighbour. Return whether that is news."""
        entry = self.entries[index]
        if entry.lost or entry.beat == 0:
            return False
        entry.lost, self._views = True, None
        return True

    def summary(self, without: int | None = None) -> TreeSummary:
        """Return what this agent knows of all agents, and its own identity.

        Args:
            without: the neighbour whose heartbeats, and those that came from it, are left out; None: all are in.
        """
        rows, places = [], dict[State, int]()
        doing = 0
        for index, entry in enumerate(self.entries):
            state = entry.state
            if state is None or (without is not None and entry.via == without):
                continue
            if state.doing and index != self._me:
                doing += 1
                state = state if doing <= MAX_DOING else state._replace(doing=())
            place = places.setdefault(state, len(places))
            rows.append(Row(index, entry.since, -entry.beat if entry.lost else entry.beat, place))
        identity = self.itself.identity
        return TreeSummary(rows=tuple(rows), states=tuple(places), identities=() if identity is None else (identity,))

    def identities(self, indices: Collection[int]) -> Iterator[Identity]:
        """Yield the identities of the agents with these indices, as far as they are known."""
        for index in indices:
            identity = self.entries[index].identity if index < len(self.entries) else None
            if identity is not None:
                yield identity

    def views(self, neighbours: Mapping[int, float], patience_s: float) -> tuple[PeerView, ...]:
        """Return all other agents, in node order.

        Args:
            neighbours: agents that this agent has a connection to -> when the connection was made, in seconds of the
                clock. An agent counts as heard then, too: the first heartbeat on a new connection comes later.
            patience_s: seconds by which the heartbeats of agents that are not in `neighbours` may be late.
        """
        if self._views is None:
            for index, entry in enumerate(self.entries):
                made = neighbours.get(index)
                _update(entry, entry.seen + patience_s if made is None else max(entry.seen, made))
            self._views = tuple(entry.view for index, entry in enumerate(self.entries) if index != self._me)
        return self._views

    def _outlive(self, since: int, beat: int) -> None:
        """Continue to count this agent's heartbeats above the count that others know of the node's last agent.

        Args:
            since: start of the agent that the others know, as `Identity.since`.
            beat: count of heartbeats that the others know.
        """
        entry = self.itself
        if beat > entry.beat or since > entry.since:
            entry.beat = max(entry.beat, beat, since)
            entry.identity = None


def _who(identity: Identity) -> tuple[str, str, int]:
    return identity.incarnation, identity.addr, identity.store_port


def _update(entry: Entry, last_seen: float) -> None:
    view, state, identity = entry.view, entry.state, entry.identity
    if state is None or identity is None or (view.last_seen == last_seen and view.lost == entry.lost):
        return
    entry.view = PeerView(
        view.node, identity.incarnation, not entry.lost, entry.lost, last_seen, state.generation, state.phase,
        state.reason, state.doing, (), identity.addr, identity.store_port,
    )  # fmt: skip
