"""Top-k reduction: each rank owns the sums of a part of the gradients, and gets the numbers of its part that other
ranks selected.

Each owner selects again among its sums and sends the selected sums to all ranks. Numbers that a rank did not send stay
in its residuals.

At N ranks, each rank sends 2·(N−1)/N·b bytes per number of a gradient, where b is the length in bytes of a rank's
encoded selection, divided by the count of the gradient's numbers. If every selection went to every rank, each rank
would send (N−1)·b. At N = 2 the bytes are the same, so every selection goes to every rank: this needs one exchange less
and loses nothing of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.codecs.sparse_message import decode, encode, rounded
from hpctrain.compress.collectives.exchange import balanced_borders, counts_between, exchange, gather
from hpctrain.compress.collectives.sparse_state import SparseSettings, SparseState
from hpctrain.compress.reducers.reducer import CodecReducer


class SparseReducer(CodecReducer):
    """The reducer of modes `topk` and `adaptive`: approximate sums, the same bits on every rank. Exempt tensors are
    summed exactly.

    A step in which any rank's gradient is not finite is summed exactly. It changes neither residuals nor the variances
    of gradients that mode `adaptive` measures.
    """

    def __init__(self, group: dist.ProcessGroup, state: SparseState, settings: SparseSettings) -> None:
        """Create the reducer before the first step.

        Args:
            group: the replicas.
            state: state of the compressed tensors; its positions are indices into the list that `reduce` gets,
                ascending.
            settings: how numbers are selected and encoded.
        """
        super().__init__(group, state.positions)
        self._state = self.holder = state
        self._feedback = state.feedback
        self._settings = settings
        self._scratch = Scratch()

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        tensors, exempt = self._split(gradients)
        if not tensors:
            return self._exempt.reduce(exempt)
        device = tensors[0].device
        step = self._state.begin(device)
        flat = [tensor.reshape(-1).float() for tensor in tensors]
        squares = torch.stack(torch._foreach_norm(flat)).float().square()
        square = squares.sum()
        # The sums of the squares show every rank whether all gradients are finite, without an additional message.
        sent = self._exempt.reduce([*exempt, squares])
        energies: list[float] = squares.tolist()
        counts, sizes = self._state.counts, self._state.sizes
        numbers = sum(sizes)
        if not all(math.isfinite(energy) for energy in energies):
            self._state.record_sent(numbers, numbers, float(square))
            self._state.not_finite()
            self._state.end_step(device)
            return sent + self._whole.reduce(tensors)
        counts.observe(step, flat)
        counts.close(step, sizes, device)
        wanted = counts.of(step, sizes)
        selected = numbers
        if wanted is None:
            sent += self._whole.reduce(tensors)
        elif self._feedback.is_flush_step(step):
            sent += self._flush(tensors, flat)
        else:
            selected, sent_bytes = self._send(step, tensors, flat, wanted, energies)
            sent += sent_bytes
        self._state.record_sent(selected, numbers, float(square))
        self._state.count_step()
        return sent

    def _flush(self, tensors: list[Tensor], flat: list[Tensor]) -> int:
        """Replace the compressed tensors by exact sums of gradients and residuals; return the bytes that this rank
        sent.

        Args:
            tensors: the compressed tensors' gradients; overwritten.
            flat: the same gradients, flat, fp32.
        """
        for position, tensor, gradient in zip(self._chosen, tensors, flat, strict=True):
            tensor.copy_(self._feedback.take_all(str(position), gradient).view_as(tensor))
        return self._whole.reduce(tensors)

    def _send(
        self, step: int, tensors: list[Tensor], flat: list[Tensor], wanted: list[int], energies: list[float]
    ) -> tuple[int, int]:
        """Replace the compressed tensors by sums of selected numbers.

        Args:
            step: number of the step, counted from 1.
            tensors: the compressed tensors' gradients; overwritten.
            flat: the same gradients, flat, fp32.
            wanted: for each tensor, how many numbers to select.
            energies: for each tensor, its squared norm summed over the ranks.

        Returns:
            How many numbers this rank selected, and the bytes that it sent.
        """
        sizes = self._state.sizes
        scales = message_scales(energies, sizes)
        keys = [str(position) for position in self._chosen]
        corrected = [self._feedback.add(key, gradient) for key, gradient in zip(keys, flat, strict=True)]
        selected = [
            self._settings.select(a, k, step, layer) for layer, (a, k) in enumerate(zip(corrected, wanted, strict=True))
        ]
        values = [numbers.div_(scale) for (_, numbers), scale in zip(selected, scales, strict=True)]
        offsets = [0, *accumulate(sizes)]
        positions = torch.cat([places + start for (places, _), start in zip(selected, offsets, strict=False)])
        to_all = self._world == 2
        borders = [0, offsets[-1]] if to_all else balanced_borders(wanted, sizes, self._world)
        parts = OwnerParts(positions, torch.cat(values), borders)
        owner = None if to_all else self._rank
        # The numbers as the other ranks will decode them. The part that this rank owns itself is not rounded.
        read = torch.cat([
            part if index == owner else rounded(part, self._settings.values) for index, part in enumerate(parts.values)
        ])  # fmt: skip
        read_parts = read.split([places.numel() for places, _ in selected])
        for key, a, (places, _), part, scale in zip(keys, corrected, selected, read_parts, scales, strict=True):
            self._feedback.store_residual(key, a, places, part * scale)
        if to_all:
            messages, sent = gather(self._message(parts, 0), self._group)
            sums = [decode(message, offsets[-1]) for message in messages]
        else:
            sums, sent = self._reduce_scatter_all_gather(step, parts, wanted, offsets, scales)
        _write(tensors, sums, offsets, scales)
        return positions.numel(), sent

    def _reduce_scatter_all_gather(
        self, step: int, parts: OwnerParts, wanted: list[int], offsets: list[int], scales: list[float]
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Return the selected sums of each part, as (positions over all tensors, values), and the bytes that this rank
        sent. Each rank owns a part: it sums the numbers that all ranks selected in the part.

        Args:
            step: number of the step, counted from 1.
            parts: the numbers that this rank selected, cut by the rank that owns them.
            wanted: for each tensor, how many sums all ranks together select.
            offsets: start of each tensor among all numbers, and the end of the last one.
            scales: for each tensor, what its values are divided by on the wire.
        """
        nothing = parts.positions[0].new_empty(0, dtype=torch.uint8)
        outgoing = [nothing if owner == self._rank else self._message(parts, owner) for owner in range(self._world)]
        incoming, sent = exchange(outgoing, self._group)
        start, end = parts.borders[self._rank : self._rank + 2]
        total = self._scratch.take((end - start,), parts.values[0]).zero_()
        # The messages are added in rank order, because the sum must not depend on which message arrived first.
        for source, message in enumerate(incoming):
            if source == self._rank:
                total.index_add_(0, parts.positions[source], parts.values[source])
            else:
                total.index_add_(0, *decode(message, end - start))
        positions, values = self._select_sums(step, total, parts, wanted, offsets)
        message = encode(positions, values, end - start, self._settings.values)
        total.index_add_(0, positions, rounded(values, self._settings.values), alpha=-1)
        self._add_sum_residual(total, start, offsets, scales)
        gathered, sent_again = gather(message, self._group)
        sums = []
        for (begin, stop), message in zip(pairwise(parts.borders), gathered, strict=True):
            places, numbers = decode(message, stop - begin)
            sums.append((places + begin, numbers))
        return sums, sent + sent_again

    def _select_sums(
        self, step: int, total: Tensor, parts: OwnerParts, wanted: list[int], offsets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Select among the sums of the part that this rank owns: of each tensor's numbers in the part, the share that
        `wanted` is of the whole tensor. With the selector random, all ranks selected the same positions, and the sums
        at these positions are selected.

        Args:
            step: number of the step, counted from 1.
            total: the sums of the part.
            parts: the numbers that this rank selected, cut by the rank that owns them.
            wanted: for each tensor, how many sums all ranks together select.
            offsets: start of each tensor among all numbers, and the end of the last one.

        Returns:
            Positions within the part, and the sums at these positions.
        """
        positions = parts.positions[self._rank]
        start = parts.borders[self._rank]
        stretches = _overlaps(start, start + total.numel(), offsets)
        if self._settings.selector == "random" or not stretches:
            # With the selector random, all ranks selected the same positions.
            return positions, total.index_select(0, positions)
        selected = []
        for layer, low, high in stretches:
            k = -(-wanted[layer] * (high - low) // (offsets[layer + 1] - offsets[layer]))
            places, values = self._settings.select(total[low - start : high - start], k, step, layer)
            selected.append((places + (low - start), values))
        return torch.cat([places for places, _ in selected]), torch.cat([values for _, values in selected])

    def _add_sum_residual(self, total: Tensor, start: int, offsets: list[int], scales: list[float]) -> None:
        """Add to this rank's residuals the sums that it owns but has not sent.

        Args:
            total: the unsent sums of the part, divided by the scales; overwritten.
            start: start of the part among all numbers.
            offsets: start of each tensor among all numbers, and the end of the last one.
            scales: for each tensor, what its values are divided by on the wire.
        """
        for layer, low, high in _overlaps(start, start + total.numel(), offsets):
            key = str(self._chosen[layer])
            self._feedback.add_residual(
                key, low - offsets[layer], total[low - start : high - start].mul_(scales[layer])
            )

    def _message(self, parts: OwnerParts, index: int) -> Tensor:
        size = parts.borders[index + 1] - parts.borders[index]
        return encode(parts.positions[index], parts.values[index], size, self._settings.values)


class OwnerParts:
    """The numbers that a rank selected, cut into parts by the rank that owns their sums."""

    def __init__(self, positions: Tensor, values: Tensor, borders: Sequence[int], first: int = 0) -> None:
        """Cut the numbers that this rank selected into one part for each rank that owns sums.

        Args:
            positions: [k], positions of the selected numbers, ascending.
            values: [k], fp32, the selected numbers.
            borders: position at which each owner's part starts, and the end of the last part.
            first: number that the attribute `positions` gives to the start of each owner's part.
        """
        counts = counts_between(positions, borders)
        self.borders = borders
        self.positions = [part + (first - start) for part, start in zip(positions.split(counts), borders, strict=False)]
        """For each owner, the positions of the selected numbers, counted from `first` at the start of the owner's part.
        """
        self.values = values.split(counts)


def _overlaps(start: int, end: int, offsets: list[int]) -> list[tuple[int, int, int]]:
    """Return the tensors that a range overlaps, each with its share of the range: (index of the tensor, start, end).

    All positions count over all tensors, one after the other.

    Args:
        start: start of the range.
        end: end of the range.
        offsets: start of each tensor, and the end of the last one.
    """
    return [
        (layer, max(start, low), min(end, high))
        for layer, (low, high) in enumerate(pairwise(offsets))
        if max(start, low) < min(end, high)
    ]


def message_scales(energies: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return a power of two near the root mean square of each tensor, by which values are divided on the wire.

    A block on the wire may hold numbers of several tensors under one scale, so the values of all tensors are brought to
    a similar magnitude. Division by a power of two is exact.

    Args:
        energies: squared norms of the tensors.
        sizes: count of numbers of each tensor.
    """
    return [math.ldexp(1.0, math.frexp(energy / size)[1] // 2) for energy, size in zip(energies, sizes, strict=True)]


def _write(tensors: list[Tensor], sums: list[tuple[Tensor, Tensor]], offsets: list[int], scales: list[float]) -> None:
    """Replace each tensor by the sum of the decoded values, and by zero where there is none.

    Args:
        tensors: the tensors; overwritten.
        sums: (positions over all tensors, values) pairs, which are added in this order.
        offsets: start of each tensor among all numbers, and the end of the last one.
        scales: for each tensor, what its values were divided by on the wire.
    """
    split = []
    for positions, values in sums:
        counts = counts_between(positions, offsets)
        split.append((positions.split(counts), values.split(counts)))
    for layer, tensor in enumerate(tensors):
        in_place = tensor.is_contiguous() and tensor.dtype == torch.float32
        flat = tensor.view(-1).zero_() if in_place else torch.zeros(tensor.numel(), device=tensor.device)
        for positions_of, values_of in split:
            flat.index_add_(0, positions_of[layer] - offsets[layer], values_of[layer], alpha=scales[layer])
        if not in_place:
            tensor.copy_(flat.view_as(tensor))
