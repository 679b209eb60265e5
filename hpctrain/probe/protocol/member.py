"""A node's part in a probe: it joins the coordinator and executes its orders until the probe is over."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.base.net.wire import LineChannel, MalformedMessage, Message
from hpctrain.base.process import Runner
from hpctrain.probe.measure.devices import MeasuringProcess
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.messages import ERROR_CHARS, ExchangeOrder, Order, PairOrder, RendezvousOrder, read_order
from hpctrain.probe.protocol.pair_measurement import DeadlineSocket, measure_pair
from hpctrain.probe.protocol.peer_connection import HANDSHAKE_S, PeerError, ProbeListener, connect, open_listener
from hpctrain.probe.system.address import interface_of, own_address
from hpctrain.probe.system.host_facts import host_facts

COORDINATOR_FILE = "coordinator.json"
"""File in the probe's folder, readable by its owner only: address, port and token of the coordinator."""


class ProbeMember:
    """One node of a probe, connected to the coordinator."""

    def __init__(
        self,
        me: str,
        addr: str,
        token: str,
        channel: LineChannel,
        listener: ProbeListener,
        runner: Runner,
        clock: Clock,
        settings: ProbeSettings,
        log: Path,
    ) -> None:
        self._me = me
        self._addr = addr
        self._token = token
        self._channel = channel
        self._listener = listener
        self._runner = runner
        self._clock = clock
        self._settings = settings
        self._log = log
        self._measuring: MeasuringProcess | None = None

    def serve(self) -> None:
        """Execute the coordinator's orders until the probe is over.

        Raises:
            HpctrainError: the coordinator died, was silent for too long or sent a malformed order.
        """
        while True:
            message = self._channel.wait_message(self._settings.silence_s)
            if message is None:
                how = f"was silent for {self._settings.silence_s:g} s"
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
                self._channel.send(self._ask(order.model_copy(update={"iface": interface_of(self._addr)})))

    def _order(self, message: Message) -> Order:
        try:
            return read_order(message)
        except MalformedMessage as error:
            self._channel.refuse(str(error))
            raise HpctrainError(f"probe: left the coordinating node: {error}") from None

    def close(self) -> None:
        """End the measuring process, if there is one."""
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None

    def _pair(self, order: PairOrder) -> Message:
        """Measure with the peer of this round. Return an answer with the figures, or with the error."""
        deadline = self._clock.now() + self._settings.slot_deadline_s
        answer: Message = {"kind": "pair", "round": order.round}
        try:
            channel = self._call(order, deadline) if order.caller else self._answer(order, deadline)
            try:
                stream = DeadlineSocket(channel.sock, self._clock, deadline)
                figures = measure_pair(stream, order.caller, self._settings)
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
        claims = {"kind": "pair", "node": self._me, "round": order.round}
        return connect(order.addr, order.port, self._token, claims, deadline - self._clock.now(), self._clock)

    def _answer(self, order: PairOrder, deadline: float) -> LineChannel:
        def is_peer(hello: Message) -> bool:
            return (hello.get("node"), hello.get("round")) == (order.peer, order.round)

        admitted = self._listener.admit(is_peer, deadline)
        if admitted is None:
            raise PeerError(f"{order.peer} did not connect")
        return admitted[0]

    def _devices(self) -> Message:
        try:
            self._measuring = MeasuringProcess(self._runner, self._clock, self._log, self._settings)
            report = self._measuring.devices(self._all_ready)
        except (CommandError, ValidationError) as error:
            self.close()
            return {"kind": "devices", "error": str(error)[:ERROR_CHARS]}
        return {"kind": "devices", "report": report.model_dump(mode="json", exclude_none=True)}

    def _ask(self, order: RendezvousOrder | ExchangeOrder) -> Message:
        """Return the measuring process's answer, or an answer with the error."""
        if self._measuring is None:
            return {"kind": order.kind, "error": "its devices were not measured"}
        try:
            return self._measuring.ask(order.to_json(), self._settings.backend_deadline_s)
        except CommandError as error:
            self.close()  # a process that hangs in a collective does not recover
            return {"kind": order.kind, "error": str(error)[:ERROR_CHARS]}

    def _all_ready(self) -> bool:
        self._channel.send({"kind": "ready"})
        message = self._channel.wait_message(self._settings.silence_s)
        return message is not None and self._order(message).kind == "go"


def run_member(
    folder: Path, me: str, addr: str, runner: Runner, clock: Clock, settings: ProbeSettings,
    given_up: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Join the probe whose coordinator published its address in `folder`, and serve until the probe is over.

    Args:
        given_up: returns whether to stop searching for a coordinator.

    Raises:
        HpctrainError: no coordinator before the deadline, or it died.
    """
    token, channel, listener = _find(folder, me, addr, clock, settings, given_up)
    member = ProbeMember(me, addr, token, channel, listener, runner, clock, settings, folder / f"{me}.log")
    try:
        member.serve()
    finally:
        member.close()
        channel.close()
        listener.close()


def _find(
    folder: Path, me: str, addr: str, clock: Clock, settings: ProbeSettings, given_up: Callable[[], bool]
) -> tuple[str, LineChannel, ProbeListener]:
    """Try until the coordinator admits this node. Return the token, the connection, and this node's own listener."""
    deadline = clock.now() + settings.join_deadline_s
    hostname = socket.gethostname()
    about: Message = {"iface": interface_of(addr), "host": hostname, "facts": host_facts(hostname).to_json()}
    pause = 0.05
    reason = f"no {COORDINATOR_FILE}"
    while clock.now() < deadline and not given_up():
        try:
            place = json.loads((folder / COORDINATOR_FILE).read_text())
            return _join(place, me, addr, about, clock)
        except (OSError, ValueError, KeyError, PeerError) as error:
            # Not there yet, or of an earlier probe that was killed: try again.
            reason = str(error)
        clock.sleep(pause)
        pause = min(1.0, pause * 1.5)
    raise HpctrainError(
        f"probe: {me} found no coordinating node within {settings.join_deadline_s:g} s ({reason}); "
        "is the folder shared by all nodes?"
    )


def _join(place: Message, me: str, addr: str, about: Message, clock: Clock) -> tuple[str, LineChannel, ProbeListener]:
    token = str(place["token"])
    listener = open_listener(addr, token, clock)
    claims: Message = {"kind": "join", "node": me, "addr": addr, "port": listener.port}
    claims |= {"switches": os.environ.get("SLURM_TOPOLOGY_ADDR"), **about}
    try:
        return token, connect(place["addr"], place["port"], token, claims, HANDSHAKE_S, clock), listener
    except (PeerError, KeyError):
        listener.close()
        raise
