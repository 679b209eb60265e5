"""The line t = alpha + beta·bytes of a pair, from its pings, its single messages and its transfer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.line_fit import AlphaBetaLine, Point, fit_lines

PairDirection = tuple[PairFigures, PairFigures]
"""One direction: the figures of its sender and of its receiver."""


def fit_pair_lines(directions: Sequence[PairDirection], bulk_bytes: int) -> list[AlphaBetaLine]:
    """Return a line for each direction.

    Args:
        bulk_bytes: volume of the transfers.
    """
    return fit_lines([_points(sender, receiver, bulk_bytes) for sender, receiver in directions])


def _points(sender: PairFigures, receiver: PairFigures, bulk_bytes: int) -> list[Point]:
    """Return the points of the ping, of the single messages, and of the transfer at its volume and at twice that.

    A ping counts as 0 bytes. Its 8 bytes are small beside the packet headers, and counting them would make alpha
    negative on a slow link.
    """
    start_up_s, rate = sender.latency.p50, receiver.bytes_per_s
    streamed = [(float(size), start_up_s + size / rate) for size in (bulk_bytes, 2 * bulk_bytes)]
    return [(0.0, start_up_s), *sender.ladder, *streamed]
