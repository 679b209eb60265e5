"""One probe, run inside the node processes: every node calls `probe_nodes`, the first one gets the topology."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.process import Runner
from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.prior import PriorSwitches
from hpctrain.probe.protocol.coordinator import Coordinator, Progress
from hpctrain.probe.protocol.member import COORDINATOR_FILE, run_member
from hpctrain.probe.protocol.peer_connection import open_listener
from hpctrain.probe.protocol.transport import StarTransport
from hpctrain.records.topology.topology import Topology

PROBE_FOLDER = "probe"
PARTIAL_EVERY_S = 2.0
"""Between two copies of what was measured so far; and at least twenty times what the last copy took."""

SavePartial = Callable[[Topology], None]


def probe_nodes(
    folder: Path,
    me: str,
    nodes: Sequence[str],
    addr: str,
    runner: Runner,
    clock: Clock,
    settings: ProbeSettings,
    progress: Progress | None = None,
    job_id: str | None = None,
    keep: SavePartial | None = None,
    prior: PriorSwitches | None = None,
) -> Topology | None:
    """Measure `nodes` from inside; every one of them calls this with the same `folder`, `nodes` and `settings`.

    The first node coordinates and returns the topology; the others return None once it is over. Only `folder`/probe is
    written, and removed at the end; no thread, socket or process stays.

    Args:
        folder: a folder that all nodes share.
        addr: the address of this node that the others can reach.
        progress: told of (phase, done, planned) on the coordinating node.
        keep: given what was measured so far, now and then, on the coordinating node: if the probe is killed, that is
            what there is.
        prior: what an earlier file says of the switches; that of the first node counts.

    Raises:
        InputError: this machine does not have that address.
        HpctrainError: on a node that is not the first, when the first is dead or silent.
    """
    own = folder / PROBE_FOLDER
    if me != nodes[0]:
        run_member(own, me, addr, runner, clock, settings)
        return None
    token = secrets.token_hex(16)
    try:
        listener = open_listener(addr, token, clock, len(nodes))
    except OSError as error:
        raise InputError(f"{me}: cannot listen on {addr}: {error.strerror}; give an address of this machine") from None
    try:
        _publish(own, addr, listener.port, token)
        coordinator = Coordinator(StarTransport(listener), nodes, clock, settings, progress or _quiet, prior)
        if keep is not None:
            coordinator.progress = _PartialWriter(coordinator, clock, job_id, keep)
        outcome = _coordinate(own, me, addr, coordinator, runner, clock, settings)
    finally:
        listener.close()
        shutil.rmtree(own, ignore_errors=True)
    return assemble(outcome, settings, clock.wall(), job_id)


def _coordinate(
    own: Path, me: str, addr: str, coordinator: Coordinator, runner: Runner, clock: Clock, settings: ProbeSettings
) -> ProbeOutcome:
    """The coordinating node is a member as well, over the same protocol, on a thread of its own.

    The coordinator sleeps in the kernel while pairs measure, so that it takes no time from that thread.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="probe-member") as pool:
        member = pool.submit(run_member, own, me, addr, runner, clock, settings, over.is_set)
        try:
            outcome = coordinator.run()
        finally:
            coordinator.close()
            # A member that has not joined by now must not go on looking for a coordinator.
            over.set()
            (own / COORDINATOR_FILE).unlink(missing_ok=True)
            member.cancel()
    # Its own part failing is in the outcome already, as that of any other node.
    error = member.exception() if not member.cancelled() else None
    if error is not None and not isinstance(error, HpctrainError):
        raise error
    return outcome


class _PartialWriter:
    """Progress that also hands over what was measured so far, from time to time."""

    def __init__(self, coordinator: Coordinator, clock: Clock, job_id: str | None, keep: SavePartial) -> None:
        self._coordinator = coordinator
        self._told = coordinator.progress
        self._clock = clock
        self._job_id = job_id
        self._keep = keep
        self._next = clock.now() + PARTIAL_EVERY_S

    def __call__(self, phase: str, done: int, planned: int) -> None:
        self._told(phase, done, planned)
        start = self._clock.now()
        if phase == "join" or start < self._next:
            return
        outcome, settings = self._coordinator.outcome, self._coordinator.settings
        self._keep(assemble(outcome, settings, self._clock.wall(), self._job_id, partial=True))
        now = self._clock.now()
        self._next = now + max(PARTIAL_EVERY_S, 20 * (now - start))


def _publish(own: Path, addr: str, port: int, token: str) -> None:
    with storage_errors(own):
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, mode=0o700)
    # 0600: the token is what keeps other users of a shared machine out of the probe.
    text = json.dumps({"addr": addr, "port": port, "token": token})
    write_text(own / COORDINATOR_FILE, text + "\n", mode=0o600)


def _quiet(phase: str, done: int, planned: int) -> None:
    """Progress that nobody watches."""
