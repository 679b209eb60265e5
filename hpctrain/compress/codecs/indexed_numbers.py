"""The message with a rank's selected numbers after the ranks agreed on an index: a list, or a count sketch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hpctrain.compress.codecs.sketch import HASHES, fold, unfold
from hpctrain.records.plan.compression import IndexForm


class IndexedCode(NamedTuple):
    """Code of sums of selected numbers. Messages of all ranks have the same length, and their sum is the message of the
    sums.

    With an index that is the union of all ranks' positions, numbers are folded by their place in the index, and sums
    that cannot be decoded are known. The published forms of the index fold them by their position: a number whose
    position the index lacks stays in the sketch, and sums that share a cell with it are wrong without notice.
    """

    ratio: float | Literal["auto"]
    """Count of all numbers divided by the count of cells in the sketch. auto: a list instead of a sketch."""
    form: IndexForm

    @property
    def loses_numbers(self) -> bool:
        """Whether ranks must learn which numbers were not decoded: only with a sketch, and not in the published
        forms, whose ranks do not learn it."""
        return self.form == "union" and self.ratio != "auto"

    def write(self, index: Tensor, positions: Tensor, numbers: Tensor, total: int) -> Tensor:
        """Return the message with this rank's numbers, int32.

        Args:
            index: [n], int64, ascending: the positions that the ranks agreed on.
            positions: [k], int64, ascending: the positions of this rank's numbers.
            numbers: [k], int32.
            total: count of the numbers from which ranks selected.
        """
        if self.form != "union":
            return fold(positions, numbers, total, self._cells(total))
        slots = torch.searchsorted(index, positions)
        if self.ratio != "auto":
            return fold(slots, numbers, len(index), self._cells(total))
        message = torch.zeros(len(index), dtype=torch.int32, device=numbers.device)
        message[slots] = numbers
        return message

    def read(self, message: Tensor, index: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Decode a sum of messages, which is overwritten.

        Args:
            message: the sum of messages, int32.
            index: as in `write`.
            total: as in `write`.

        Returns:
            The sums at the positions of the index, int32 [n], 0 where they could not be decoded; and whether each was
            decoded, bool [n].
        """
        if self.form != "union":
            return unfold(message, total, self._cells(total), index)
        if self.ratio != "auto":
            return unfold(message, len(index), self._cells(total))
        return message, torch.ones_like(message, dtype=torch.bool)

    def arrived(self, index: Tensor, positions: Tensor, decoded: Tensor) -> Tensor:
        """Return for each of this rank's numbers whether its sum was decoded, bool [k]. In the published forms, all
        count as decoded.

        Args:
            index: as in `write`.
            positions: as in `write`.
            decoded: [n], bool: whether the sum at each position of the index was decoded.
        """
        if not self.loses_numbers:
            return torch.ones_like(positions, dtype=torch.bool)
        return decoded[torch.searchsorted(index, positions)]

    def _cells(self, total: int) -> int:
        assert self.ratio != "auto", "a list has no cells"
        return max(HASHES, int(total / self.ratio))
