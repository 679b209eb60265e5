"""Runs a probe inside the node processes: every node calls `probe_nodes`, which returns the topology on the first node.

Every node is a member: it joins the coordinator and executes its orders until the probe is over. The first node also
runs the coordinator.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, HpctrainError, InputError
from hpctrain.base.net.wire import LineChannel, MalformedMessage, Message
from hpctrain.base.process import Runner
from hpctrain.base.system.core_sets import CoreSet
from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.switches import PriorSwitches
from hpctrain.probe.protocol.connections import HANDSHAKE_S, PeerError, ProbeListener, StarTransport, connect
from hpctrain.probe.protocol.coordinator import Coordinator, Progress
from hpctrain.probe.protocol.messages import ERROR_CHARS, ExchangeOrder, Order, PairOrder, RendezvousOrder, read_order
from hpctrain.probe.protocol.node_devices import NodeDevices
from hpctrain.probe.protocol.pair_measurement import DeadlineSocket, measure_pair
from hpctrain.probe.system.host import host_facts, interface_of, own_address
from hpctrain.records.topology.topology import Topology

PROBE_FOLDER = "probe"
PARTIAL_EVERY_S = 2.0
"""Least seconds between two partial topologies (the topology measured so far). The time between two of them is also at
least twenty times as long as making and storing the last one took."""

SavePartial = Callable[[Topology], None]
"""Function that stores the topology measured so far."""
COORDINATOR_FILE = "coordinator.json"
"""File in the probe's folder, readable by its owner only: address, port and token of the coordinator."""


def probe_nodes(
    node: ProbeNode, nodes: Sequence[str], progress: Progress | None = None, job_id: str | None = None,
    keep: SavePartial | None = None, prior: PriorSwitches | None = None,
) -> Topology | None:  # fmt: skip
    """Run a probe of `nodes`. Every node calls this function with the same folder, `nodes` and settings.

    On the first node, which coordinates, it returns the topology; on the others it returns None when the probe is over.
    Only `node.folder`/probe is written, and removed at the end; no thread, socket or process stays.

    Args:
        progress: called with (phase, done, planned) on the first node.
        job_id: Slurm job of the probe.
        keep: called from time to time on the first node with the topology measured so far, so that it survives when the
            probe is killed.
        prior: the switches in an earlier topology file; only the first node's argument counts.

    Raises:
        InputError: on the first node, when `node.addr` is not an address of this machine.
        StorageError: on the first node, when `node.folder` cannot be written.
        HpctrainError: on another node than the first, when the first node is dead or silent.
    """
    node = replace(node, folder=node.folder / PROBE_FOLDER)
    if node.name != nodes[0]:
        run_member(node)
        return None
    try:
        listener = ProbeListener(node.addr, secrets.token_hex(16), node.clock, len(nodes))
    except OSError as error:
        raise InputError(
            f"{node.name}: cannot listen on {node.addr}: {error.strerror}; give an address of this machine"
        ) from None
    try:
        _publish(node, listener)
        coordinator = Coordinator(StarTransport(listener), nodes, node.clock, node.settings, progress, prior)
        if keep is not None:
            coordinator.progress = _saves_partial(coordinator, node.clock, job_id, keep)
        outcome = _coordinate(node, coordinator)
    finally:
        listener.close()
        shutil.rmtree(node.folder, ignore_errors=True)
    return assemble(outcome, node.settings, node.clock.wall(), job_id)


def _coordinate(node: ProbeNode, coordinator: Coordinator) -> ProbeOutcome:
    """Run the coordinator, and this node's member on another thread; return the measurements of all nodes.

    The coordinator sleeps in the kernel while pairs measure, so it takes no CPU time from the member.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="probe-member") as pool:
        member = pool.submit(run_member, node, over.is_set)
        try:
            outcome = coordinator.run()
        finally:
            coordinator.close()
            # A member that has not joined by now must stop searching for a coordinator.
            over.set()
            (node.folder / COORDINATOR_FILE).unlink(missing_ok=True)
            member.cancel()
    # A failure of this node's member is in the outcome already, as with any other node.
    error = member.exception() if not member.cancelled() else None
    if error is not None and not isinstance(error, HpctrainError):
        raise error
    return outcome


def _saves_partial(coordinator: Coordinator, clock: Clock, job_id: str | None, keep: SavePartial) -> Progress:
    """Return a progress callback that calls the coordinator's present callback, and from time to time also passes the
    topology measured so far to `keep`.

    Args:
        job_id: Slurm job of the probe, for the topology; None without Slurm.
        keep: stores the topology measured so far.
    """
    progress, due_s = coordinator.progress, clock.now() + PARTIAL_EVERY_S

    def report(phase: str, done: int, planned: int) -> None:
        nonlocal due_s
        progress(phase, done, planned)
        start = clock.now()
        if phase == "join" or start < due_s:
            return
        keep(assemble(coordinator.outcome, coordinator.settings, clock.wall(), job_id, partial=True))
        now = clock.now()
        due_s = now + max(PARTIAL_EVERY_S, 20 * (now - start))

    return report


def _publish(node: ProbeNode, listener: ProbeListener) -> None:
    with storage_errors(node.folder):
        shutil.rmtree(node.folder, ignore_errors=True)
        node.folder.mkdir(parents=True, mode=0o700)
    # 0600: only the token keeps other users of a shared machine out of the probe.
    text = json.dumps({"addr": node.addr, "port": listener.port, "token": listener.token})
    write_text(node.folder / COORDINATOR_FILE, text + "\n", mode=0o600)


@dataclass(frozen=True)
class ProbeNode:
    """What the process of one node needs to take part in a probe: the node's name and address, and the probe's folder
    and settings."""

    name: str
    addr: str
    """Address of this node that the other nodes can reach."""
    folder: Path
    """Folder of the probe, which all nodes share."""
    settings: ProbeSettings
    """Settings of the probe, equal on every node."""
    runner: Runner
    clock: Clock
    core_sets: Sequence[CoreSet] = ()
    """Core sets of the node's CPU devices if `settings.cpu_devices` is more than 1; empty if they are not known."""


class ProbeMember:
    """One node's side of a probe: executes the orders of the coordinator, to which `channel` leads. Other nodes connect
    to `listener` to measure pairs."""

    def __init__(self, node: ProbeNode, channel: LineChannel, listener: ProbeListener) -> None:
        self._node = node
        self._channel = channel
        self._listener = listener
        self._measuring: NodeDevices | None = None

    def serve(self) -> None:
        """Execute the coordinator's orders until the probe is over.

        Raises:
            HpctrainError: the coordinator died, was silent for too long or sent a malformed order.
        """
        while True:
            message = self._channel.wait_message(self._node.settings.silence_s)
            if message is None:
                how = f"was silent for {self._node.settings.silence_s:g} s"
                if self._channel.closed:
                    how = f"was left: {self._channel.fault}" if self._channel.fault else "ended"
                raise HpctrainError(f"probe: the coordinating node {how}; see its log")
            order = self._order(message)
            if order.kind == "over":
                return
            if isinstance(order, PairOrder):
                self._channel.send(self._pair(order))
            elif order.kind == "devices":
                self._channel.send(self._devices())
            elif isinstance(order, RendezvousOrder):
                self._channel.send(self._ask(order))
            elif isinstance(order, ExchangeOrder):
                self._channel.send(self._ask(order.model_copy(update={"iface": interface_of(self._node.addr)})))

    def _order(self, message: Message) -> Order:
        try:
            return read_order(message)
        except MalformedMessage as error:
            self._channel.refuse(str(error))
            raise HpctrainError(f"probe: left the coordinating node: {error}") from None

    def close(self) -> None:
        """End the measuring processes, if there are any."""
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None

    def _pair(self, order: PairOrder) -> Message:
        """Measure with the peer of the order. Return the answer to the coordinator, with the figures or with the
        error."""
        deadline = self._node.clock.now() + self._node.settings.slot_deadline_s
        answer: Message = {"kind": "pair", "round": order.round}
        try:
            channel = self._call(order, deadline) if order.caller else self._answer(order, deadline)
            try:
                stream = DeadlineSocket(channel.sock, self._node.clock, deadline)
                figures = measure_pair(stream, order.caller, self._node.settings)
                used = interface_of(own_address(channel.sock))
            finally:
                channel.close()
        except PeerError as error:
            return answer | {"error": str(error)[:ERROR_CHARS]}
        except ValidationError as error:
            return answer | {"error": f"its figures are not valid: {error.errors()[0]['msg']}"[:ERROR_CHARS]}
        return answer | {"figures": figures.model_copy(update={"iface": used}).model_dump(mode="json")}

    def _call(self, order: PairOrder, deadline: float) -> LineChannel:
        assert order.addr is not None, "read_order saw to it"
        assert order.port is not None, "read_order saw to it"
        claims = {"kind": "pair", "node": self._node.name, "round": order.round}
        clock = self._node.clock
        return connect(order.addr, order.port, self._listener.token, claims, deadline - clock.now(), clock)

    def _answer(self, order: PairOrder, deadline: float) -> LineChannel:
        def is_peer(hello: Message) -> bool:
            return (hello.get("node"), hello.get("round")) == (order.peer, order.round)

        admitted = self._listener.admit(is_peer, deadline)
        if admitted is None:
            raise PeerError(f"{order.peer} did not connect")
        return admitted[0]

    def _devices(self) -> Message:
        node = self._node
        try:
            log = node.folder / f"{node.name}.log"
            self._measuring = NodeDevices(node.runner, node.clock, log, node.settings, node.addr, node.core_sets)
            report = self._measuring.measure(self._all_ready)
        except (CommandError, ValidationError) as error:
            self.close()
            return {"kind": "devices", "error": str(error)[:ERROR_CHARS]}
        return {"kind": "devices", "report": report.model_dump(mode="json", exclude_none=True)}

    def _ask(self, order: RendezvousOrder | ExchangeOrder) -> Message:
        """Pass the order to the measuring process. Return the answer to the coordinator: that of the process, or one
        with the error."""
        if self._measuring is None:
            return {"kind": order.kind, "error": "its devices were not measured"}
        try:
            return self._measuring.ask(order, self._node.settings.backend_deadline_s)
        except CommandError as error:
            self.close()  # a process that hangs in a collective does not recover
            return {"kind": order.kind, "error": str(error)[:ERROR_CHARS]}

    def _all_ready(self) -> bool:
        self._channel.send({"kind": "ready"})
        message = self._channel.wait_message(self._node.settings.silence_s)
        return message is not None and self._order(message).kind == "go"


def run_member(node: ProbeNode, given_up: Callable[[], bool] = lambda: False) -> None:
    """Join the probe whose coordinator published its address in `node.folder`, and execute its orders until the probe
    is over.

    Args:
        given_up: returns whether to stop searching for a coordinator.

    Raises:
        HpctrainError: there was no coordinator before the deadline or before `given_up` returned True, or it died, was
            silent for too long or sent a malformed order.
    """
    channel, listener = _find(node, given_up)
    member = ProbeMember(node, channel, listener)
    try:
        member.serve()
    finally:
        member.close()
        channel.close()
        listener.close()


def _find(node: ProbeNode, given_up: Callable[[], bool]) -> tuple[LineChannel, ProbeListener]:
    """Try to join until the coordinator admits this node. Return the connection to the coordinator, and this node's
    listener for other nodes.

    Args:
        given_up: returns whether to stop trying, which raises the error.

    Raises:
        HpctrainError: no coordinator admitted this node within `join_deadline_s` of the probe's settings, or
            `given_up` returned True.
    """
    clock, limit_s = node.clock, node.settings.join_deadline_s
    deadline = clock.now() + limit_s
    hostname = socket.gethostname()
    about: Message = {
        "iface": interface_of(node.addr), "host": hostname, "facts": host_facts(hostname).to_json(),
        "switches": os.environ.get("SLURM_TOPOLOGY_ADDR"),
    }  # fmt: skip
    pause = 0.05
    reason = f"no {COORDINATOR_FILE}"
    while clock.now() < deadline and not given_up():
        try:
            return _join(node, json.loads((node.folder / COORDINATOR_FILE).read_text()), about)
        except (OSError, ValueError, KeyError, PeerError) as error:
            # Not there yet, or of an earlier probe that was killed: try again.
            reason = str(error)
        clock.sleep(pause)
        pause = min(1.0, pause * 1.5)
    raise HpctrainError(
        f"probe: {node.name} found no coordinating node within {limit_s:g} s ({reason}); "
        "is the folder shared by all nodes?"
    )


def _join(node: ProbeNode, place: Message, about: Message) -> tuple[LineChannel, ProbeListener]:
    token = str(place["token"])
    listener = ProbeListener(node.addr, token, node.clock)
    claims = {"kind": "join", "node": node.name, "addr": node.addr, "port": listener.port, **about}
    try:
        return connect(place["addr"], place["port"], token, claims, HANDSHAKE_S, node.clock), listener
    except (PeerError, KeyError):
        listener.close()
        raise
