"""TAGC for a sharded state, as published (Polyakov et al., EuroMLSys 2025, algorithm 1): the ranks agree on an index,
and the numbers are reduced to the rank that owns them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.indexed_numbers import IndexedCode
from hpctrain.compress.codecs.sparse_message import ValueCode, pack_bits, unpack_bits
from hpctrain.compress.collectives.agreed_index import agreed_index
from hpctrain.compress.collectives.exchange import counts_between, gather
from hpctrain.compress.collectives.reduce_scatter import DenseReduceScatter, ShardedParameter
from hpctrain.compress.collectives.sparse_state import SparseSettings, SparseState
from hpctrain.compress.reducers.sparse_reduce_scatter import SparseReduceScatter
from hpctrain.compress.reducers.tagc import agree_quanta


class TagcReduceScatter(SparseReduceScatter):
    """The reduce-scatter of mode `tagc` for one `fully_shard` module of a stage, with error feedback.

    Each rank selects numbers over whole parameters. Numbers travel as integers, multiples of a quantum per parameter,
    so that their sums are exact. Parameters that are exempt from compression are summed exactly. If any rank's gradient
    is not finite, every rank gets NaN for its part, and no residual changes.
    """

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], first: int, state: SparseState,
        code: IndexedCode,
    ) -> None:  # fmt: skip
        """Create the reduce-scatter before the first step.

        Args:
            pieces: the module's parameters, in the order of the flat gradient.
            compressed: indices in `pieces` of the parameters to compress, ascending; at least one.
            first: number of compressed parameters in the stage's earlier `fully_shard` modules.
            state: state that all reduce-scatters of the stage share.
            code: form of the index and of the numbers.
        """
        super().__init__(pieces, compressed, first, state, SparseSettings("sampled", ValueCode.FP32))
        self._code = code
        self._exact = DenseReduceScatter()

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world = dist.get_world_size(group)
        rows = self._flat.rows(gradient, world)
        step = self.residuals.begin(gradient.device)
        stretches = [rows[:, start:end] for start, end in (*self._compressed, *self._exempt)]
        energies: list[float] = torch.stack(torch._foreach_norm(stretches)).double().square().tolist()
        broken = torch.tensor(int(not all(map(math.isfinite, energies))), dtype=torch.int32, device=gradient.device)
        with ACTIVITY.doing("all-reduce over dp, overflow", waits="dp"):
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=group)
        sent_bytes = _ring_bytes(1, world)
        if bool(broken):
            self.residuals.not_finite()
            output.fill_(math.nan)
            return sent_bytes
        wanted = self.residuals.wanted(step, self._first, len(self._compressed))
        if wanted is None:
            count = sum(self._sizes)
            sent_bytes += self._exact(output, gradient, group)
        else:
            sent_bytes += self._sum_exempt(output, rows, group)
            count, selected_bytes = self._sum_selected(output, rows, wanted, step, group)
            sent_bytes += selected_bytes
        self.residuals.record_sent(count, sum(self._sizes), sum(energies[: len(self._compressed)]))
        return sent_bytes

    def _sum_exempt(self, output: Tensor, rows: Tensor, group: dist.ProcessGroup) -> int:
        """Write the sums of the parameters that are exempt from compression to `output`; return the bytes sent."""
        if not self._exempt:
            return 0
        exempt = torch.cat([rows[:, start:end] for start, end in self._exempt], dim=1).contiguous()
        sums = exempt.new_empty(exempt.shape[1])
        sent_bytes = self._exact(sums, exempt.view(-1), group)
        for (start, end), part in zip(self._exempt, sums.split([b - a for a, b in self._exempt]), strict=True):
            output[start:end] = part
        return sent_bytes

    def _sum_selected(
        self, output: Tensor, rows: Tensor, wanted: list[int], step: int, group: dist.ProcessGroup
    ) -> tuple[int, int]:
        """Write the sums of the selected numbers to `output`, and what was not sent to the residuals.

        Returns:
            The count of numbers that this rank selected, and the bytes that it sent.
        """
        world, width = len(rows), sum(self._owned)
        add_to = self.residuals.feedback.add_to
        corrected = [add_to(key, copy) for key, copy in zip(self._keys(), self._copies(rows), strict=True)]
        selected = [
            self._settings.select(a, k, step, self._first + number)
            for number, (a, k) in enumerate(zip(corrected, wanted, strict=True))
        ]
        quanta = agree_quanta([values for _, values in selected], world, group)
        integers = [(values / quantum).round_().int() for (_, values), quantum in zip(selected, quanta, strict=True)]
        positions, order = torch.cat(self._by_owner([places for places, _ in selected], width)).sort()
        with ACTIVITY.doing("index over dp", waits="dp"):
            index, index_bytes = agreed_index(self._code.form, positions, world * width, group)
        borders = [owner * width for owner in range(world + 1)]
        counts = counts_between(positions, borders)
        indices = [
            part - start for part, start in zip(index.split(counts_between(index, borders)), borders, strict=False)
        ]
        numbers = torch.cat(integers)[order]
        messages = [
            self._code.write(part, places - start, values, width)
            for part, places, values, start in zip(
                indices, positions.split(counts), numbers.split(counts), borders, strict=False
            )
        ]
        decoded, number_bytes = self._exchange(output, messages, indices, quanta, group)
        arrived = torch.empty_like(order, dtype=torch.bool)
        arrived[order] = self._code.arrived(index, positions, decoded)
        parts = arrived.split([len(places) for places, _ in selected])
        for key, a, (places, _), sent, quantum, there in zip(
            self._keys(), corrected, selected, integers, quanta, parts, strict=True
        ):
            self.residuals.feedback.store_residual(key, a, places[there], sent[there].float() * quantum)
        return len(positions), index_bytes + number_bytes + _ring_bytes(len(quanta), world)

    def _by_owner(self, places: list[Tensor], width: int) -> list[Tensor]:
        """Return positions in the compressed numbers of all owners, one owner after the other.

        Args:
            places: for each compressed parameter, positions in its numbers.
            width: count of compressed numbers that each rank owns.
        """
        flat, start = [], 0
        for positions, owned in zip(places, self._owned, strict=True):
            owner = positions.div(owned, rounding_mode="floor")
            flat.append(positions + owner * (width - owned) + start)
            start += owned
        return flat

    def _exchange(
        self, output: Tensor, messages: list[Tensor], indices: list[Tensor], quanta: list[float],
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Reduce the messages to their owners, and write the sums of this rank's part to `output`.

        Args:
            messages: the messages to all ranks, by owner.
            indices: for each owner, the positions of the index in its compressed numbers.
            quanta: quantum of each compressed parameter.

        Returns:
            Whether the sum at each position of the whole index was decoded, as far as ranks learn it; and the bytes
            that this rank sent.
        """
        world, rank, width = len(messages), dist.get_rank(group), sum(self._owned)
        lengths = [len(message) for message in messages]
        incoming = messages[0].new_empty(world * lengths[rank])
        with ACTIVITY.doing("all-to-all over dp, chosen numbers", waits="dp"):
            dist.all_to_all_single(incoming, torch.cat(messages), [lengths[rank]] * world, lengths, group=group)
        total = incoming.view(world, -1).sum(0, dtype=torch.int32)
        sums, decoded = self._code.read(total, indices[rank], width)
        flat = torch.zeros(width, device=output.device)
        flat[indices[rank]] = sums.float()
        for (start, end), part, quantum in zip(self._compressed, flat.split(self._owned), quanta, strict=True):
            torch.mul(part, quantum, out=output[start:end])
        sent_bytes = 4 * (sum(lengths) - lengths[rank])
        if not self._code.loses_numbers:
            return decoded, sent_bytes
        # The bit at the end keeps the message of an owner with an empty index from being empty.
        bitmaps, bitmap_bytes = gather(pack_bits(torch.cat([decoded, decoded.new_ones(1)])), group)
        flags = [unpack_bits(bits, len(part)) for bits, part in zip(bitmaps, indices, strict=True)]
        return torch.cat(flags), sent_bytes + bitmap_bytes


def _ring_bytes(numbers: int, world: int) -> int:
    return 2 * (world - 1) * 4 * numbers // world
