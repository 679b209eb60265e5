"""Stage messages that share cards and uplinks with sums of gradients over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hpctrain.planner.devices.placement_links import PlacementLinks


class SumWindow(NamedTuple):
    """When the messages of one of a pipeline rank's sums pass, in seconds from the start of the step."""

    start_s: float
    end_s: float


class _SharedSpan(NamedTuple):
    """A time in which a message takes `factor` times as long, because sums pass a card or uplink of the message."""

    start_s: float
    end_s: float
    factor: float
    ranks: tuple[int, ...]
    """Pipeline ranks whose sums pass."""


class CardSharing:
    """Delays the stage messages of a replica while sums pass the same cards and uplinks, and counts how many seconds
    the sums lose to the messages.

    Args:
        links: the links of the placement.
        replica: number of the replica.
        rank_of_stage: [stage] -> its pipeline rank.
        windows: [pipeline rank] -> when the messages of its sums pass, in order.
        lanes: [message] -> its lane (see `StageDurations`).
    """

    def __init__(
        self,
        links: PlacementLinks,
        replica: int,
        rank_of_stage: Sequence[int],
        windows: Sequence[Sequence[SumWindow]],
        lanes: Sequence[int],
    ) -> None:
        hops = list(pairwise(rank_of_stage))
        spans = {hop: _shared_spans(links, replica, hop, windows) for hop in dict.fromkeys(hops)}
        # Messages back pass the same cards in the other direction.
        self._spans = [spans[hop] for hop in (*hops, *hops)]
        self._lanes = lanes
        self._carried: dict[tuple[int, int], float] = {}
        """(pipeline rank, lane) -> seconds of messages, each alone on its link, that passed beside the rank's sums."""

    def sent_s(self, message: int, begin_s: float, alone_s: float) -> float:
        """Return when a message has been sent, and count it.

        Args:
            message: number of the message, as in `StageDurations.by_message`.
            begin_s: when its first byte is sent.
            alone_s: seconds that it takes without sums, less its latency.
        """
        now_s = begin_s
        for start_s, end_s, factor, ranks in self._spans[message]:
            if now_s + alone_s <= start_s:
                break
            if end_s <= now_s:
                continue
            alone_s -= max(0.0, start_s - now_s)
            now_s = max(now_s, start_s)
            beside_s = min(alone_s, (end_s - now_s) / factor)
            for rank in ranks:
                key = rank, self._lanes[message]
                self._carried[key] = self._carried.get(key, 0.0) + beside_s
            now_s += factor * beside_s
            alone_s -= beside_s
        return now_s + alone_s

    def carried_s(self, rank: int) -> float:
        """Return the seconds that the sums of a pipeline rank lose to the messages of this replica: those of the lane
        with most of them."""
        return max((seconds for (of_rank, _), seconds in self._carried.items() if of_rank == rank), default=0.0)


def _shared_spans(
    links: PlacementLinks, replica: int, hop: tuple[int, int], windows: Sequence[Sequence[SumWindow]]
) -> list[_SharedSpan]:
    """Return the times in which messages between two pipeline ranks of a replica share cards or uplinks with sums, in
    order, without overlap."""
    sharing = [(rank, window) for rank in links.ranks_beside(replica, *hop) for window in windows[rank]]
    borders = sorted({border for _, window in sharing for border in window})
    spans = []
    for start_s, end_s in pairwise(borders):
        ranks = tuple(rank for rank, window in sharing if window.start_s <= start_s and end_s <= window.end_s)
        if ranks:
            spans.append(_SharedSpan(start_s, end_s, links.factor_beside(replica, *hop, ranks), ranks))
    return spans
