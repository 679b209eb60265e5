"""Settings of a probe: sizes, repetitions and deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

MIB = 2**20

Mode = Literal["health", "full", "sampled"]

MODES: tuple[Mode, ...] = get_args(Mode)

PARTIAL_FILE = "partial.json"
"""File with the topology measured so far, in the folder of a probe that runs outside a training job."""

FULL_UP_TO = 256
"""Most nodes with which `hpctrain probe` measures every pair by default."""
PREFLIGHT_FULL_UP_TO = 64
"""Most nodes with which the probe inside a training job measures every pair. With more, it measures only enough to
judge each node."""


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of one probe, equal on every node: what is measured, how often, and the time limits.

    Names with `ladder` belong to the size sweep, names with `bulk` to the transfer that measures bandwidth.
    A node with a bandwidth below the share `slow_ratio` of the other nodes' gets a warning, one below the share
    `exclude_ratio` is excluded. The settings `…_deadline_s` limit the phases of the probe, `slot_deadline_s` one pair.
    """

    seed: int = 0
    """Seed of the random choices of the pairs of each round. With equal measurements, an equal seed gives equal rounds.
    """
    device: str = "auto"
    """Devices to measure: auto, cpu or cuda; none measures only links."""
    cpu_devices: int = 1
    """Number of devices into which a node without GPUs is cut, each with a core set."""
    share: int = 1
    """Number of virtual nodes that share this machine and its memory."""
    loopback: bool = False
    """Whether the nodes are virtual nodes: processes of one machine."""
    shared: bool = False
    """Whether other jobs may run on the nodes, because the probe's job has only a part of each."""
    mode: Mode = "full"
    """health: a few rounds, enough to judge each node. full: every pair. sampled: enough pairs to infer switches."""
    health_rounds: int = 15
    """Rounds of the mode health. With fewer, good nodes seem slow by chance; more change nothing
    (docs/results/probe.md)."""
    sampled_rounds: int = 32
    """Random rounds that the mode sampled begins with."""
    slow_ratio: float = 0.95
    """A node is degraded if its bandwidth is below this share of the median of all nodes in the first measurement, and
    of the good pairs' median in its retest. Devices have limits of their own (`probe.faults.node_faults`), except those
    of virtual nodes, to which this share applies."""
    exclude_ratio: float = 0.80
    """A node is excluded if its bandwidth is below this share of the median of all nodes in the first measurement, and
    of the good pairs' median in its retest. 0: no node is excluded for its speed."""

    pings: int = 50
    """Number of round trips that each end of a pair times, after the warm-up."""
    ping_warm_up: int = 8
    ping_limit_s: float = 0.5
    """Time limit of the pings. A slow link gets fewer round trips, but at least `ping_warm_up + 8`."""

    ladder_bytes: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144, MIB)
    """Message sizes of the size sweep in bytes; the line t = alpha + beta·bytes is fitted to their times."""
    ladder_times: int = 8
    """Timed messages of each size in the size sweep."""
    ladder_limit_s: float = 0.2
    """Time limit of the size sweep. On a slow link, the sweep ends with the size at which the limit passes, after at
    least 3 messages of this size."""

    bulk_bytes: int = 16 * MIB
    """Least volume of the transfer in each direction. A link that carries this volume in less than `bulk_s` gets
    more."""
    bulk_bytes_max: int = 64 * MIB
    bulk_s: float = 0.05
    """Least seconds of the transfer: a shorter one measures the socket buffers and not the network."""
    bulk_limit_s: float = 2.0
    """Seconds after which the transfer ends, however little was sent."""

    isolated_up_to: int = 8
    """Most nodes with which the mode full also measures every pair alone."""

    join_deadline_s: float = 60.0
    slot_deadline_s: float = 15.0
    """Time limit of one pair in a round. A dead or hung node delays its round by about this time."""
    devices_deadline_s: float = 120.0
    backend_deadline_s: float = 90.0
    """Time limit of the messages over the training backend, all rounds together."""

    @property
    def silence_s(self) -> float:
        """Seconds without a message after which a node considers the coordinator lost and leaves the probe."""
        deadlines = (self.join_deadline_s, self.slot_deadline_s, self.devices_deadline_s, self.backend_deadline_s)
        return max(deadlines) + 15.0


def default_mode(nodes: int) -> Mode:
    """Return the default mode of `hpctrain probe`: full up to FULL_UP_TO nodes, else sampled."""
    return "full" if nodes <= FULL_UP_TO else "sampled"


def preflight_mode(nodes: int) -> Mode:
    """Return the mode of the probe inside a training job: full up to PREFLIGHT_FULL_UP_TO nodes, else health. It
    measures no more than a plan needs, because the devices are idle meanwhile."""
    return "full" if nodes <= PREFLIGHT_FULL_UP_TO else "health"


def with_shared_nodes(settings: ProbeSettings) -> ProbeSettings:
    """Return the settings for nodes on which other jobs may run: no node is excluded for its speed, because the load of
    the other jobs is no fault of the node and may end soon."""
    return replace(settings, shared=True, exclude_ratio=0.0)


def local_settings(count: int, device: str = "auto", seed: int = 0) -> ProbeSettings:
    """Return settings for `count` virtual nodes of one machine: shorter deadlines, and thresholds that excuse most
    differences, because virtual nodes compete for the same cores and differ by chance."""
    return ProbeSettings(
        seed=seed,
        device=device,
        share=count,
        loopback=True,
        slow_ratio=0.5,
        exclude_ratio=0.0,
        join_deadline_s=30.0,
        slot_deadline_s=5.0,
        devices_deadline_s=60.0,
        backend_deadline_s=60.0,
    )
