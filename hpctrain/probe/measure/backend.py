"""Figures of messages over the training backend (Gloo, NCCL): who meets whom, what a rank reports, and its lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpctrain.probe.measure.figures import SizeTimes
from hpctrain.probe.measure.line_fit import fit_lines
from hpctrain.probe.measure.rounds import Pair, rounds
from hpctrain.records.format.document import Part
from hpctrain.records.topology.link import BackendFigures

MAX_ROUNDS = 15
"""Rounds of a large group: every node meets so many others, and the classes get their medians."""
SIZES = (8, 1024, 16384, 131072, 2**19, 2**21, 2**23)
"""Bytes of the messages. The first one is also the answer."""
LARGE_BYTES = 131072
TIMES, TIMES_LARGE, TIMES_MIN = 12, 5, 3
"""Messages of a size; of those above LARGE_BYTES; and of any size when the time is up."""
WARM_UP, WARM_UP_LARGER = 5, 1
"""Messages of the first size, and of each other one, that do not count."""
LIMIT_S = 0.5
"""A slow link stops at the size that passes this time."""

_NETWORK = re.compile(r"NCCL INFO .*Using network (\S+)")


class BackendReport(Part):
    """What one rank measured with the ranks that it met."""

    backend: str
    """gloo or nccl."""
    times: dict[int, SizeTimes]
    """Peer's rank -> (bytes, one-way seconds) of messages to it."""
    network: str | None = None
    """What NCCL says that it uses between nodes: IB, Socket."""


def backend_rounds(world: int, seed: int) -> list[list[Pair]]:
    """The rounds in which ranks meet: all pairs of a small group, the first rounds of a large one."""
    return rounds(world, seed)[:MAX_ROUNDS]


def times_of(size: int) -> int:
    """How many messages of this size are timed."""
    return TIMES_LARGE if size > LARGE_BYTES else TIMES


def warm_up_of(size: int) -> int:
    """How many messages of this size go before those."""
    return WARM_UP if size == SIZES[0] else WARM_UP_LARGER


def choose_backend(kinds: Sequence[set[str]], loopback: bool) -> str:
    """nccl when every node has CUDA devices of its own, else gloo.

    Args:
        kinds: kinds of devices of each node.
        loopback: the nodes are processes of one machine and share its devices, which NCCL refuses.
    """
    return "nccl" if kinds and all("cuda" in found for found in kinds) and not loopback else "gloo"


def backend_lines(
    names: Sequence[str], reports: Mapping[str, BackendReport]
) -> dict[tuple[str, str], tuple[str, BackendFigures]]:
    """(sender, receiver) -> the backend and the line through its message times.

    Args:
        names: the node of each rank.
    """
    # A line needs two sizes; what a slow link did not get to is not guessed.
    measured = [
        (sender, names[peer], times)
        for sender, report in reports.items()
        for peer, times in report.times.items()
        if len(times) >= 2 and 0 <= peer < len(names)
    ]
    found = {}
    for (sender, target, _), line in zip(measured, fit_lines([times for *_, times in measured]), strict=True):
        if line.beta_s_per_byte == 0:
            continue  # times that do not grow with the size tell no bandwidth
        figures = BackendFigures(
            alpha_s=line.alpha_s,
            beta_s_per_byte=line.beta_s_per_byte,
            break_bytes=line.break_bytes,
            network=reports[sender].network,
        )
        found[sender, target] = (reports[sender].backend, figures)
    return found


def network_used(log: str) -> str | None:
    """What NCCL carries messages between nodes with, from its log at NCCL_DEBUG=INFO: IB, Socket, or a plugin."""
    found = _NETWORK.search(log)
    return found.group(1) if found else None
