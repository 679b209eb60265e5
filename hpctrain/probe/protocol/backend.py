"""Messages over the training backend (gloo, NCCL): the rounds of pairs, a rank's report, and the fit of t = alpha +
beta·bytes to its times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpctrain.probe.measure.figures import SizeTimes, fit_lines
from hpctrain.probe.pair_selection.rounds import Pair, rounds
from hpctrain.records.format.document import Part
from hpctrain.records.topology.link import BackendFigures

MAX_ROUNDS = 15
"""Most rounds: each node measures with at most this many others, which is enough for the medians of the link
classes."""
SIZES = (8, 1024, 16384, 131072, 2**19, 2**21, 2**23)
"""Sizes of the messages in bytes. Each message is answered by one of the first size."""
LARGE_BYTES = 131072
TIMES, TIMES_LARGE, TIMES_MIN = 12, 5, 3
"""Messages of each size; of each size above `LARGE_BYTES`; and of each size when the time is up."""
WARM_UP, WARM_UP_LARGER = 5, 1
"""Messages that are not counted: of the first size, and of each other size."""
LIMIT_S = 0.5
"""Time limit of a size sweep in seconds: a slow link stops at the size that exceeds it."""

_NETWORK = re.compile(r"NCCL INFO .*Using network (\S+)")


class BackendReport(Part):
    """The message times that one rank measured with its partners."""

    backend: str
    """Name of the backend: gloo or nccl."""
    times: dict[int, SizeTimes]
    """Peer's rank -> (bytes, one-way seconds) of messages to it."""
    network: str | None = None
    """The network that NCCL reports for traffic between nodes: IB, Socket."""


def backend_rounds(world: int, seed: int) -> list[list[Pair]]:
    """Return rounds of pairs of ranks: all pairs of a small group, the first `MAX_ROUNDS` rounds of a large one."""
    return rounds(world, seed)[:MAX_ROUNDS]


def times_of(size: int) -> int:
    """Return the number of timed messages of this size."""
    return TIMES_LARGE if size > LARGE_BYTES else TIMES


def warm_up_of(size: int) -> int:
    """Return the number of warm-up messages of this size."""
    return WARM_UP if size == SIZES[0] else WARM_UP_LARGER


def choose_backend(kinds: Sequence[set[str]], loopback: bool) -> str:
    """Return 'nccl' when every node has CUDA devices that no other node shares, else 'gloo'.

    Args:
        kinds: the kinds of devices on each node.
        loopback: whether the nodes are processes of one machine; NCCL refuses devices that they share.
    """
    return "nccl" if kinds and all("cuda" in on_node for on_node in kinds) and not loopback else "gloo"


def backend_lines(
    names: Sequence[str], reports: Mapping[str, BackendReport]
) -> dict[tuple[str, str], tuple[str, BackendFigures]]:
    """Return (sender, receiver) -> the backend and the line through its message times.

    Args:
        names: the node of each rank.
        reports: the report of each node.
    """
    # A line needs two sizes. A link too slow for two gets no line.
    measured = [
        (sender, names[peer], times)
        for sender, report in reports.items()
        for peer, times in report.times.items()
        if len(times) >= 2 and 0 <= peer < len(names)
    ]
    lines = {}
    for (sender, target, _), line in zip(measured, fit_lines([times for *_, times in measured]), strict=True):
        if line.beta_s_per_byte == 0:
            continue  # times that do not grow with the size give no bandwidth
        figures = BackendFigures(
            alpha_s=line.alpha_s,
            beta_s_per_byte=line.beta_s_per_byte,
            break_bytes=line.break_bytes,
            network=reports[sender].network,
        )
        lines[sender, target] = (reports[sender].backend, figures)
    return lines


def network_used(log: str) -> str | None:
    """Return the network that NCCL uses between nodes, from its log at NCCL_DEBUG=INFO: IB, Socket, or a plugin."""
    match = _NETWORK.search(log)
    return match.group(1) if match else None
