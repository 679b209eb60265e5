"""Connects to the agents that have no connection to this agent yet, without ever waiting for one of them.

An agent publishes its address in a file, which another thread reads, because the file system may hang. A new address
is dialled at once. An address that does not answer is dialled again after times that double with each attempt
(backoff).
"""

from __future__ import annotations

import errno
import ipaddress
import json
import selectors
import socket
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import InputError
from hpctrain.base.helper_thread import Background
from hpctrain.base.json_text import parse_json
from hpctrain.base.net.wire import Watch
from hpctrain.base.owned_files import read_owned

ADDRESS_POLL_S = 0.2
"""Seconds between two looks at the address files."""
ADDRESS_READS_PER_CALL = 8
"""Most address files that one call in the thread for files reads, so that other calls come in between."""
INITIAL_BACKOFF_S = 0.2
"""Least seconds from the first to the second dialling of an address that does not answer. If the first dialling takes
longer, the second one begins when it has ended."""
MAX_BACKOFF_S = 5.0
"""Largest value of `ConnectionAttempt.backoff_s`."""
ADDRESS_BYTES_MAX = 4096
"""Largest address file that is read."""
CONNECT_TIMEOUT_S = 3.0
"""Seconds after which a connection attempt is given up: long enough for a second request, because the kernel repeats
a lost request after 1 s."""

Address = tuple[str, int]
"""(IP address, port)"""


@dataclass
class ConnectionAttempt:
    """A node to connect to: its published address, and the state of the connection attempt. Times are seconds of the
    agent's clock."""

    address: Address | None = None
    """The published address; None if there is none yet."""
    backoff_s: float = INITIAL_BACKOFF_S
    """Least seconds from the start of the next attempt to the start of the one after it."""
    not_before: float = float("-inf")
    """Time before which the node is not dialled again."""
    connecting: socket.socket | None = None
    """Socket of the attempt that runs; None if none runs."""
    give_up: float = 0.0
    """Time at which the running attempt is given up."""


class PeerConnector:
    """Connects to the agents that publish their addresses in `folder`. No method waits for an agent or for the file
    system."""

    def __init__(self, folder: Path, watch: Watch, in_files: Background) -> None:
        """Prepare to connect.

        Args:
            watch: its `wait` returns when a connection is made.
            in_files: reads the files with addresses.
        """
        self._folder = folder
        self._watch = watch
        self._in_files = in_files
        self._reading: Future[dict[str, Address | None]] | None = None
        self._targets: dict[str, ConnectionAttempt] = {}
        self._to_look: deque[str] = deque()
        self._last_look = float("-inf")

    def dial(self, now: float, missing: Collection[str]) -> list[tuple[str, socket.socket]]:
        """Begin the connections that are due. Return (node, connected socket) of each connection that was made since
        the last call.

        Args:
            now: seconds of the agent's clock.
            missing: the nodes to connect to.
        """
        if not self._to_look and now - self._last_look >= ADDRESS_POLL_S:
            self._last_look = now
            self._to_look.extend(missing)
        self._read_addresses(missing)
        for node in missing:
            target = self._targets.get(node)
            if target is not None and target.connecting is None and now >= target.not_before:
                self._connect(now, target)
        return self._made(now)

    def reset_backoff(self, node: str) -> None:
        """Reset the backoff of a node that answers, so that it is dialled at once if it is lost."""
        target = self._targets.get(node)
        if target is not None:
            target.backoff_s, target.not_before = INITIAL_BACKOFF_S, float("-inf")

    def close(self) -> None:
        """Close every connection that is still being made."""
        for target in self._targets.values():
            self._abandon(target)

    def _read_addresses(self, missing: Collection[str]) -> None:
        """Take the addresses that were read, and begin to read those that are due."""
        if self._reading is None and self._to_look:
            due = [self._to_look.popleft() for _ in range(min(ADDRESS_READS_PER_CALL, len(self._to_look)))]
            nodes = [node for node in due if node in missing]
            self._reading = self._in_files(published_addresses, self._folder, nodes) if nodes else None
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            for node, address in reading.result().items():
                target = self._targets.setdefault(node, ConnectionAttempt())
                if address != target.address:
                    self._abandon(target)
                    self._targets[node] = ConnectionAttempt(address)

    def _connect(self, now: float, target: ConnectionAttempt) -> None:
        address = target.address
        if address is None:
            return
        target.not_before = now + target.backoff_s
        target.backoff_s = min(2 * target.backoff_s, MAX_BACKOFF_S)
        try:
            sock = socket.socket(_family(address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return  # too many open files; the next attempt may succeed
        try:
            refused = sock.connect_ex(address) not in (0, errno.EINPROGRESS)
        except OSError:
            refused = True  # an address of an interface that this machine does not have
        if refused:
            sock.close()
            return
        target.connecting, target.give_up = sock, now + CONNECT_TIMEOUT_S
        self._watch.add(sock, selectors.EVENT_WRITE)

    def _made(self, now: float) -> list[tuple[str, socket.socket]]:
        made = []
        for node, target in self._targets.items():
            if target.connecting is None or target.address is None:
                continue
            # A second call says how the first one ended, or that it has not ended.
            result = target.connecting.connect_ex(target.address)
            if result in (0, errno.EISCONN):
                self._watch.remove(target.connecting)
                made.append((node, target.connecting))
                target.connecting = None
            elif result not in (errno.EALREADY, errno.EINPROGRESS) or now >= target.give_up:
                self._abandon(target)
        return made

    def _abandon(self, target: ConnectionAttempt) -> None:
        if target.connecting is not None:
            self._watch.remove(target.connecting)
            target.connecting.close()
            target.connecting = None


def publish_address(folder: Path, node: str, address: Address) -> None:
    """Write the address at which a node listens to the node's file in `folder`.

    Raises:
        StorageError: the file cannot be written.
    """
    addr, port = address
    write_text(folder / f"{node}.json", json.dumps({"addr": addr, "port": port}) + "\n")


def published_address(folder: Path, node: str) -> Address | None:
    """Return the address in a node's file in `folder`; None if there is no file, or no IP address and port in it. A
    host name is no address: looking it up could take long."""
    try:
        content = parse_json(read_owned(folder / f"{node}.json", ADDRESS_BYTES_MAX))
        addr, port = str(ipaddress.ip_address(content["addr"])), content["port"]
    except (OSError, InputError, ValueError, KeyError, TypeError):
        return None
    return (addr, port) if type(port) is int and 0 < port < 1 << 16 else None


def published_addresses(folder: Path, nodes: Sequence[str]) -> dict[str, Address | None]:
    """Return node -> what `published_address` returns for it."""
    return {node: published_address(folder, node) for node in nodes}


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET
