"""What a probe does and how long it may take: sizes, repetitions and deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

MIB = 2**20

Mode = Literal["health", "full", "sampled"]

MODES: tuple[Mode, ...] = get_args(Mode)

PARTIAL_FILE = "partial.json"
"""In the folder of a probe of its own: the topology as far as it is measured."""

FULL_UP_TO = 256
"""Up to this many nodes `hpctrain probe` measures every pair unless it is told otherwise."""
PREFLIGHT_FULL_UP_TO = 64
"""Up to this many nodes the probe inside a training job measures every pair; above, it judges nodes only."""


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of one probe; the same on every node."""

    seed: int = 0
    """Orders the rounds; the same seed gives the same schedule."""
    device: str = "auto"
    """Devices to measure: auto, cpu, cuda, or none for the links alone."""
    share: int = 1
    """Virtual nodes that share this machine; its memory is divided by it."""
    loopback: bool = False
    """True when the nodes are processes of one machine."""
    mode: Mode = "full"
    """health: a few rounds, enough to judge each node. full: every pair. sampled: enough pairs to know the switches."""
    health_rounds: int = 15
    """Rounds of the mode health: fewer call good nodes slow by chance, more change nothing (docs/results/probe.md)."""
    sampled_rounds: int = 32
    """Random rounds that the mode sampled begins with."""
    slow_ratio: float = 0.95
    """A node or device below this share of the median of its peers is degraded."""
    exclude_ratio: float = 0.80
    """A node whose network is below this share, also with two good partners, is left out. 0: none is."""

    pings: int = 50
    """Round trips timed from each side, after the warm-up."""
    ping_warm_up: int = 8
    ping_limit_s: float = 0.5
    """A slow link gets fewer round trips, but never under `ping_warm_up + 8`."""

    ladder_bytes: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144, MIB)
    """Sizes of single messages, each timed on its own: where the line t = alpha + beta·bytes comes from."""
    ladder_times: int = 8
    """Messages of each size."""
    ladder_limit_s: float = 0.2
    """A slow link stops at the size that passes this time, with at least 3 messages of it."""

    bulk_bytes: int = 16 * MIB
    """Least volume in each direction; a link that carries it in under `bulk_s` gets more."""
    bulk_bytes_max: int = 64 * MIB
    bulk_s: float = 0.05
    """Shorter transfers time the socket buffers and not the wire."""
    bulk_limit_s: float = 2.0
    """A slow link stops sending after this time, whatever the volume."""

    isolated_up_to: int = 8
    """Up to this many nodes every pair is also measured alone."""

    join_deadline_s: float = 60.0
    slot_deadline_s: float = 15.0
    """What one pair may take; a dead or hung node costs at most one slot."""
    devices_deadline_s: float = 120.0
    backend_deadline_s: float = 90.0
    """What the messages over the training backend may take, all rounds together."""

    @property
    def silence_s(self) -> float:
        """How long a node waits for the coordinator's next word before it gives up."""
        deadlines = (self.join_deadline_s, self.slot_deadline_s, self.devices_deadline_s, self.backend_deadline_s)
        return max(deadlines) + 15.0


def default_mode(nodes: int) -> Mode:
    """What a probe measures that somebody asked for: every pair while that is quick, else a sample."""
    return "full" if nodes <= FULL_UP_TO else "sampled"


def preflight_mode(nodes: int) -> Mode:
    """What the probe inside a training job measures: devices stand still meanwhile, so no more than a plan needs."""
    return "full" if nodes <= PREFLIGHT_FULL_UP_TO else "health"


def local_settings(count: int, device: str = "auto", seed: int = 0) -> ProbeSettings:
    """Settings for `count` virtual nodes of one machine: shorter deadlines, and a slack threshold, because virtual
    nodes take turns on the same cores and differ by chance."""
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
