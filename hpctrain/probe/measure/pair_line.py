"""The line t = alpha + beta·bytes of a pair, from its ping, its single messages and its transfer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.line_fit import AlphaBetaLine, Point, fit_lines

PairDirection = tuple[PairFigures, PairFigures]
"""One direction: what its sender measured and what its receiver measured."""


def fit_pair_lines(directions: Sequence[PairDirection], bulk_bytes: int) -> list[AlphaBetaLine]:
    """A line for each direction.

    Args:
        bulk_bytes: volume of the transfers.
    """
    return fit_lines([_points(sender, receiver, bulk_bytes) for sender, receiver in directions])


def _points(sender: PairFigures, receiver: PairFigures, bulk_bytes: int) -> list[Point]:
    """A ping, the single messages, and the transfer, whose rate holds for its volume and for any larger one.

    A ping counts as no bytes: its 8 are lost in the headers of its packet, and on a slow link their share would make
    alpha negative.
    """
    start_up_s, rate = sender.latency.p50, receiver.bytes_per_s
    streamed = [(float(size), start_up_s + size / rate) for size in (bulk_bytes, 2 * bulk_bytes)]
    return [(0.0, start_up_s), *sender.ladder, *streamed]
