"""The connections between agents: TCP, JSON lines, a heartbeat every 0.25 s. Each pair of agents has a connection; in
a job of more than 32 nodes, the connections are a tree (`agent/tree`).

An agent publishes its address in the run folder. Of each pair of agents, the later one in node order connects. A
closed connection is noticed at once, silence after a timeout. Every connection starts with a mutual proof that both
sides know the run's key, which only the run's owner can read, and every line after it carries a MAC
(`base.net.authentication`). Except for `PeerMesh.wait`, nothing in this module waits for a node that hangs or cannot be
reached, for a stranger on the port, or, once the connections are open, for the file system.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.agent.agreement_messages import AgreementMessage, StrictModel
from hpctrain.agent.decide import alive
from hpctrain.agent.peer_connector import PeerConnector, publish_address
from hpctrain.agent.peer_messages import HEARTBEAT_S, Announcement
from hpctrain.agent.tree.reading import read_message
from hpctrain.agent.tree.routing import FORWARD_S, TreeMessage, TreeRouting
from hpctrain.agent.view import DecisionLimits, PeerView
from hpctrain.base.helper_thread import in_background
from hpctrain.base.net.authentication import MAX_LINE_BYTES, AuthListener, HandshakeClient, HandshakeServer, derive_key
from hpctrain.base.net.vertex_cover import NodePair
from hpctrain.base.net.wire import LINE_LIMIT, LineChannel, MalformedMessage, Message, Watch, Watchable
from hpctrain.records.history.generation import Generation

HANDSHAKE_TIMEOUT_S = 2.0
"""Seconds after which a caller that has not authenticated is disconnected."""
HANDSHAKE_LINE_BYTES = 16384
"""Longest line, in bytes, that is accepted from a dialled node until it has authenticated, unless the connections are a
tree: its first heartbeat may follow its proof at once."""
CALL_S = 5.0
"""Seconds after which a dialled node that has not authenticated is dialled again. The node's process may hang
although its kernel has accepted the connection."""
GIVE_UP_MS = 60_000
"""Milliseconds without any answer after which the kernel closes a connection: the agent may listen at another
address now."""


@dataclass(frozen=True)
class _OutgoingHandshake:
    """A connection to a dialled node that has not authenticated yet."""

    since: float
    """When the connection was made, in seconds of the agent's clock."""
    channel: LineChannel
    proof: HandshakeClient


class PeerMesh:
    """The connections of this agent to other agents of the run: to each of them, or in a tree to its neighbours."""

    def __init__(
        self,
        folder: Path,
        me: str,
        nodes: tuple[str, ...],
        addr: str,
        key: str,
        files: Executor,
        tree: TreeRouting | None = None,
    ) -> None:
        """Prepare the connections.

        Args:
            folder: where agents publish their addresses.
            addr: IP address at which other nodes reach this one.
            key: the run's key.
            files: reads the files with addresses.
            tree: which connections to keep; None: one to each other agent.
        """
        self._folder = folder
        self._me = me
        self._nodes = nodes
        self._key = key.encode()
        self._addr = addr
        self._tree = tree
        self._listener: AuthListener | None = None
        self._watch = Watch()
        self._connector = PeerConnector(folder, self._watch, in_background(files, self.wake))
        self._called: dict[str, _OutgoingHandshake] = {}
        self._channels: dict[str, LineChannel] = {}
        self._views = {node: PeerView(node) for node in nodes if node != me}
        self._fresh: set[str] = set()
        self._messages: list[tuple[str, AgreementMessage]] = []
        self._last_beat = float("-inf")
        self._bell, self._bell_button = socket.socketpair()
        self._watch.add(self._bell)

    def open(self) -> None:
        """Listen, and publish the address in the run folder.

        Raises:
            OSError: the address is not one of this machine, or the folder for addresses cannot be made.
            StorageError: the file with the address cannot be written.
        """
        self._listener = AuthListener(
            self._addr,
            self._watch,
            proof=lambda: HandshakeServer(self._key, {"node": self._me}),
            channel=lambda connection: _channel(connection, MAX_LINE_BYTES),
            peers=len(self._nodes),
            hello_s=HANDSHAKE_TIMEOUT_S,
        )
        self._folder.mkdir(exist_ok=True)
        publish_address(self._folder, self._me, self._listener.address)

    def close(self) -> None:
        """Close every connection; the other agents notice at once."""
        called = [called.channel for called in self._called.values()]
        for channel in [*self._channels.values(), *called]:
            channel.close()
        self._connector.close()
        if self._listener is not None:
            self._listener.close()
        self._watch.close()
        self._bell.close()
        self._bell_button.close()

    def watch(self, file: Watchable) -> None:
        """Let `wait` also return when `file` has something to read."""
        self._watch.add(file)

    def unwatch(self, file: Watchable) -> None:
        """Let `wait` no longer return because of `file`."""
        self._watch.remove(file)

    def wait(self, seconds: float) -> None:
        """Return when bytes or a new connection from another agent arrive, a file that `watch` got has something to
        read, or `wake` was called; at the latest after `seconds`."""
        self._watch.wait(min(seconds, FORWARD_S) if self._tree is not None and self._tree.has_news else seconds)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096, socket.MSG_DONTWAIT)

    def wake(self) -> None:
        """Let `wait` return. Any thread may call this."""
        with contextlib.suppress(OSError):  # rung often enough already, or closed
            self._bell_button.send(b".", socket.MSG_DONTWAIT)

    def send(self, nodes: Collection[str], message: AgreementMessage) -> None:
        """Send a message to the agents of some nodes. For those that cannot be reached, it is lost."""
        self._send([(node, message) for node in nodes] if self._tree is None else self._tree.relay(nodes, message))

    def is_near(self, node: str) -> bool:
        """Return whether this agent keeps a connection to the agent of a node."""
        return self._tree is None or self._tree.is_near(node)

    @property
    def hears_all(self) -> bool:
        """Whether this agent hears each other agent itself, so that a silent one cannot be reached."""
        return self._tree is None

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        """Return (node of the sender, message) of each message of the agreement that has arrived since the last
        call."""
        if self._tree is not None:
            return self._tree.take_messages()
        messages, self._messages = self._messages, []
        return messages

    def views(self) -> tuple[PeerView, ...]:
        """Return the other agents as last seen, in node order."""
        return tuple(self._views.values()) if self._tree is None else self._tree.views()

    def store_secret(self, record: Generation) -> str:
        """Return the secret of a generation's store, which every node derives from the run's key.

        The secret is written to no file, and sent only to the node's own workers.
        """
        return derive_key(self._key, "store", record.number, record.proposer).hex()

    def exchange(self, now: float, announcement: Announcement, at_once: bool = False) -> None:
        """Process what has arrived, dial nodes without a connection, and send a heartbeat when one is due.

        Args:
            now: seconds of the agent's clock.
            announcement: what the heartbeat says about this agent.
            at_once: whether to send a heartbeat even if none is due.
        """
        self._accept_peers(now)
        self._finish_handshakes(now)
        for node, channel in list(self._channels.items()):
            self._receive(now, node, channel)
        self._dial(now)
        if self._tree is None:
            self._send_heartbeats(now, announcement, at_once)
            return
        self._send(self._tree.outgoing(now, announcement, at_once))
        for node in self._tree.surplus():
            self._disconnect(node)

    def _accept_peers(self, now: float) -> None:
        """Accept callers. Those that prove to know the run's key become peers; the others are disconnected."""
        assert self._listener is not None, "open comes first"
        # First the callers that had time to answer: new callers may replace pending ones.
        self._admit(now, self._listener)
        self._listener.accept(now)
        self._admit(now, self._listener)

    def _admit(self, now: float, listener: AuthListener) -> None:
        while (admitted := listener.admit(now, self._is_peer)) is not None:
            channel, session = admitted
            self._join(now, session.claims["node"], channel)

    def _is_peer(self, claims: Message) -> bool:
        """Return whether the caller is another node of this run that meant to call this node. A process on a dead
        agent's port could forward calls for that agent to this one, and each such call would replace the living
        connection between the caller and this agent.

        Args:
            claims: what the caller has proved about itself.
        """
        node = claims.get("node")
        return isinstance(node, str) and node in self._views and claims.get("to") == self._me

    def _dial(self, now: float) -> None:
        before = self._nodes[: self._nodes.index(self._me)] if self._tree is None else self._tree.wanted(now)
        missing = [node for node in before if node not in self._channels and node not in self._called]
        for node, connection in self._connector.dial(now, missing):
            proof = HandshakeClient(self._key, {"node": self._me, "to": node})
            # The first summary of a tree is longer than a heartbeat.
            line_limit = HANDSHAKE_LINE_BYTES if self._tree is None else LINE_LIMIT
            with contextlib.suppress(OSError):  # it closed already, and will be dialled again
                self._called[node] = _OutgoingHandshake(now, _channel(connection, line_limit), proof)
                self._watch.add(self._called[node].channel)

    def _finish_handshakes(self, now: float) -> None:
        """Continue the handshakes with dialled nodes. A dialled node must prove that it knows the run's key and is
        the node that was dialled."""
        for node, called in list(self._called.items()):
            message = called.channel.wait_message(0)
            if message is None and not called.channel.closed and now - called.since < CALL_S:
                continue
            hello = None if message is None else called.proof.answer_challenge(message)
            if hello is not None and called.channel.send(hello):
                continue
            del self._called[node]
            session = None if message is None else called.proof.verify_welcome(message)
            if session is not None and session.claims.get("node") == node:
                called.channel.seal(session.send_key, session.receive_key)
                called.channel.line_limit = LINE_LIMIT
                self._join(now, node, called.channel)
            else:
                self._drop(called.channel)

    def _join(self, now: float, node: str, channel: LineChannel) -> None:
        # The view is unchanged until the first heartbeat.
        if node in self._channels:
            self._drop(self._channels[node])
        self._channels[node] = channel
        self._fresh.add(node)
        if self._tree is not None:
            self._tree.joined(now, node)

    def _receive(self, now: float, node: str, channel: LineChannel) -> None:
        for content in channel.receive():
            try:
                message = read_message(content)
                if isinstance(message, Announcement) and message.node != node:
                    raise MalformedMessage(f"it proved to be {node} and says that it is {message.node!r}")
                if isinstance(message, TreeMessage) != (self._tree is not None):
                    raise MalformedMessage(f"it sent a message {message.kind!r}, as agents of a job of another size do")
            except MalformedMessage as error:
                channel.refuse(str(error))
                break
            if isinstance(message, AgreementMessage):
                self._messages.append((node, message))
                continue
            self._connector.reset_backoff(node)
            if isinstance(message, Announcement):
                self._views[node] = message.seen(now)
            elif self._tree is not None:
                self._tree.take(now, node, message)
        if channel.closed:
            self._disconnect(node)

    def _send_heartbeats(self, now: float, announcement: Announcement, at_once: bool) -> None:
        """Send a heartbeat to all peers if one is due or `at_once` is true, else only to those that just joined."""
        due = at_once or now - self._last_beat >= HEARTBEAT_S
        if due:
            self._last_beat = now
        self._send([(node, announcement) for node in self._channels if due or node in self._fresh])
        self._fresh.clear()

    def _send(self, messages: Sequence[tuple[str, StrictModel]]) -> None:
        """Send messages to the agents of nodes; without a connection, a message is lost."""
        contents: dict[int, Message] = {}
        for node, message in messages:
            channel = self._channels.get(node)
            if channel is None:
                continue
            # A message for many agents is the same object for all.
            if id(message) not in contents:
                contents[id(message)] = message.to_json()
            if not channel.send(contents[id(message)]):
                self._disconnect(node)

    def _disconnect(self, node: str) -> None:
        channel = self._channels.pop(node)
        self._drop(channel)
        if self._tree is not None:
            self._tree.closed(node)
        if channel.fault:
            print(f"hpctrain agent: the connection to {node} was closed: {channel.fault}", flush=True)
        view = self._views[node]
        # A connection that closes before its first heartbeat does not count as a lost node.
        self._views[node] = replace(view, connected=False, lost=view.lost or view.connected)

    def _drop(self, channel: LineChannel) -> None:
        self._watch.remove(channel)
        channel.close()


def _channel(connection: socket.socket, line_limit: int) -> LineChannel:
    """Return the channel of a connection between agents.

    A send never waits: if the socket buffers are full, the channel closes. They have room for minutes of heartbeats, or
    for the largest record, so only a peer that hangs lets them fill.

    Raises:
        OSError: the other side has closed the connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP_MS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINE_LIMIT)
    return LineChannel(connection, send_timeout_s=0.0, line_limit=line_limit, strict=True)


def attempt_key(key: str, attempt: int) -> str:
    """Return the key of the agents of one attempt, made from the run's key. Agents of another attempt, which may still
    run where Slurm does not reach them, do not get a connection."""
    return derive_key(key.encode(), "attempt", attempt).hex()


class ReachabilityTracker:
    """The pairs of nodes of which at least one does not hear the other (`unreachable_pairs`), as one agent knows them,
    and since when. With no `nodes`, as in a tree, there are no pairs."""

    def __init__(self, me: str, nodes: Sequence[str], limits: DecisionLimits) -> None:
        self._me = me
        self._nodes = nodes
        self._limits = limits
        self.silent: dict[NodePair, float] = {}
        """Pair of nodes of which at least one does not hear the other -> since when, in seconds of the agent's
        clock."""

    def unheard(self, now: float, peers: Sequence[PeerView]) -> tuple[int, ...]:
        """Return the positions in the job's list of nodes, ascending, of the nodes that this agent does not hear.

        Args:
            now: seconds of the agent's clock.
        """
        if not self._nodes:
            return ()
        heard = {peer.node for peer in peers if alive(now, peer, self._limits)} | {self._me}
        return tuple(place for place, node in enumerate(self._nodes) if node not in heard)

    def note(self, now: float, peers: Sequence[PeerView]) -> None:
        """Update `silent` from the peers' last heartbeats, which name the nodes that each peer does not hear. One
        direction is enough: a pair counts if one of its nodes does not hear the other.

        Args:
            now: seconds of the agent's clock.
        """
        if not self._nodes:
            return
        unheard = {
            peer.node: [self._nodes[place] for place in peer.unheard if place < len(self._nodes)]
            for peer in peers
            if alive(now, peer, self._limits)
        }
        self.silent = {pair: self.silent.get(pair, now) for pair in unreachable_pairs(self._me, self._nodes, unheard)}


def unreachable_pairs(me: str, nodes: Sequence[str], unheard: Mapping[str, Collection[str]]) -> set[NodePair]:
    """Return the pairs of nodes, each in node order, of which one does not hear the other although a third node does.

    A node that no node hears is lost, and in no pair. A node that some node hears may be at work, so it is not lost,
    and in a pair with each node that does not hear it.

    Args:
        me: this agent's node.
        nodes: all nodes, in order.
        unheard: other node that this agent hears -> the nodes that the other node reports not to hear.
    """
    by_node = {me: [node for node in nodes if node != me and node not in unheard], **unheard}
    lost = set.intersection(*map(set, by_node.values()))
    place = {node: number for number, node in enumerate(nodes)}
    return {
        (node, other) if place[node] < place[other] else (other, node)
        for node, others in by_node.items()
        for other in others
        if other not in lost and other != node
    }
