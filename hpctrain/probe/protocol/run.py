"""A probe inside the node processes: every node calls `probe_nodes`, and the first one gets the topology."""

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
"""Least time between two partial topologies; it is also at least twenty times what the last one took to write."""

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
    """Run a probe of `nodes`. Each of them calls this with the same `folder`, `nodes` and `settings`.

    The first node coordinates and returns the topology; the others return None when the probe is over. Only
    `folder`/probe is written, and removed at the end; no thread, socket or process stays.

    Args:
        folder: a folder that all nodes share.
        addr: the address of this node that the others can reach.
        progress: called with (phase, done, planned) on the coordinating node.
        keep: called from time to time with the topology measured so far, on the coordinating node, so that it survives
            when the probe is killed.
        prior: the switches in an earlier topology file; only that of the first node counts.

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
    """Run the coordinator, and on another thread this node's member. Return the outcome.

    The coordinator sleeps in the kernel while pairs measure, so it takes no processor time from the member.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="probe-member") as pool:
        member = pool.submit(run_member, own, me, addr, runner, clock, settings, over.is_set)
        try:
            outcome = coordinator.run()
        finally:
            coordinator.close()
            # A member that has not joined by now must stop searching for a coordinator.
            over.set()
            (own / COORDINATOR_FILE).unlink(missing_ok=True)
            member.cancel()
    # A failure of this node's member is in the outcome already, as with any other node.
    error = member.exception() if not member.cancelled() else None
    if error is not None and not isinstance(error, HpctrainError):
        raise error
    return outcome


class _PartialWriter:
    """Progress that from time to time also passes the topology measured so far to `keep`."""

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
    # 0600: only the token keeps other users of a shared machine out of the probe.
    text = json.dumps({"addr": addr, "port": port, "token": token})
    write_text(own / COORDINATOR_FILE, text + "\n", mode=0o600)


def _quiet(phase: str, done: int, planned: int) -> None:
    """Ignore the progress."""
