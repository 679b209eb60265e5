"""Runs a probe inside the node processes: every node calls `probe_nodes`, and the first node gets the topology."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.pair_selection.prior import PriorSwitches
from hpctrain.probe.protocol.coordinator import Coordinator, Progress
from hpctrain.probe.protocol.member import COORDINATOR_FILE, ProbeNode, run_member
from hpctrain.probe.protocol.peer_connection import ProbeListener
from hpctrain.probe.protocol.transport import StarTransport
from hpctrain.records.topology.topology import Topology

PROBE_FOLDER = "probe"
PARTIAL_EVERY_S = 2.0
"""Least seconds between two partial topologies; the time between them is also at least twenty times as long as writing
the last one."""

SavePartial = Callable[[Topology], None]


def probe_nodes(
    node: ProbeNode, nodes: Sequence[str], progress: Progress | None = None, job_id: str | None = None,
    keep: SavePartial | None = None, prior: PriorSwitches | None = None,
) -> Topology | None:  # fmt: skip
    """Run a probe of `nodes`. Each of them calls this with the same folder, `nodes` and settings.

    The first node coordinates and returns the topology; the others return None when the probe is over. Only
    `node.folder`/probe is written, and removed at the end; no thread, socket or process stays.

    Args:
        progress: called with (phase, done, planned) on the coordinating node.
        keep: called from time to time with the topology measured so far, on the coordinating node, so that it survives
            when the probe is killed.
        prior: the switches in an earlier topology file; only that of the first node counts.

    Raises:
        InputError: this machine does not have that address.
        HpctrainError: on a node that is not the first, when the first is dead or silent.
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
            coordinator.progress = _PartialWriter(coordinator, node.clock, job_id, keep)
        outcome = _coordinate(node, coordinator)
    finally:
        listener.close()
        shutil.rmtree(node.folder, ignore_errors=True)
    return assemble(outcome, node.settings, node.clock.wall(), job_id)


def _coordinate(node: ProbeNode, coordinator: Coordinator) -> ProbeOutcome:
    """Run the coordinator, and this node's member on another thread; return the measurements.

    The coordinator sleeps in the kernel while pairs measure, so it takes no processor time from the member.
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


class _PartialWriter:
    """A progress callback that from time to time also passes the topology measured so far to `keep`."""

    def __init__(self, coordinator: Coordinator, clock: Clock, job_id: str | None, keep: SavePartial) -> None:
        self._coordinator = coordinator
        self._progress = coordinator.progress
        self._clock = clock
        self._job_id = job_id
        self._keep = keep
        self._next = clock.now() + PARTIAL_EVERY_S

    def __call__(self, phase: str, done: int, planned: int) -> None:
        self._progress(phase, done, planned)
        start = self._clock.now()
        if phase == "join" or start < self._next:
            return
        outcome, settings = self._coordinator.outcome, self._coordinator.settings
        self._keep(assemble(outcome, settings, self._clock.wall(), self._job_id, partial=True))
        now = self._clock.now()
        self._next = now + max(PARTIAL_EVERY_S, 20 * (now - start))


def _publish(node: ProbeNode, listener: ProbeListener) -> None:
    with storage_errors(node.folder):
        shutil.rmtree(node.folder, ignore_errors=True)
        node.folder.mkdir(parents=True, mode=0o700)
    # 0600: only the token keeps other users of a shared machine out of the probe.
    text = json.dumps({"addr": node.addr, "port": listener.port, "token": listener.token})
    write_text(node.folder / COORDINATOR_FILE, text + "\n", mode=0o600)
