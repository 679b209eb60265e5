"""TAGC for a sharded state, as published (Polyakov et al., EuroMLSys 2025, algorithm 1): the ranks agree on an index,
and the numbers are reduced to the rank that owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.indexed_numbers import IndexedCode
from hpctrain.compress.codecs.sparse_message import ValueCode, pack_bits, unpack_bits
from hpctrain.compress.collectives.agreed_index import agreed_index
from hpctrain.compress.collectives.exchange import counts_between, gather
from hpctrain.compress.collectives.overlapped_work import OverlappedWork, begin_all_to_all
from hpctrain.compress.collectives.reduce_scatter import DenseReduceScatter, ScatterUnderWay, ShardedParameter
from hpctrain.compress.collectives.sparse_state import SparseSettings, SparseState
from hpctrain.compress.reducers.sparse_reduce_scatter import GivenGradient, SelectedNumbers, SparseReduceScatter
from hpctrain.compress.reducers.tagc import agree_quanta


class TagcReduceScatter(SparseReduceScatter):
    """The reduce-scatter of mode `tagc` for one `fully_shard` module of a stage, with error feedback.

    Each rank selects numbers over whole parameters. Numbers travel as integers, multiples of a quantum per parameter,
    so that their sums are exact. Parameters that are exempt from compression are summed exactly. If any rank's gradient
    is not finite, every rank gets NaN for its part, and no residual changes.

    `begin` waits for the other ranks until they have agreed on the index; the numbers are on their way when it returns.
    With a sketch, it waits for these, too, because ranks then tell each other which numbers they have decoded.
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

    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        given = self._given(gradient, dist.get_world_size(group))
        broken = torch.tensor(int(not given.is_finite), dtype=torch.int32, device=gradient.device)
        with ACTIVITY.doing("all-reduce over dp, overflow", waits="dp"):
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=group)
        sent_bytes = _ring_bytes(1, len(given.rows))
        if bool(broken):
            return ScatterUnderWay(sent_bytes, OverlappedWork(None, gradient.device), partial(self._give_up, None))
        wanted = self.residuals.wanted(given.step, self._first, len(self._compressed))
        if wanted is not None:
            return self._begin_selected(given, wanted, sent_bytes, group)
        exact = self._exact.begin(gradient, group)
        write_sums = partial(self._write_exact, given, exact)
        return ScatterUnderWay(sent_bytes + exact.sent_bytes, exact.work, write_sums)

    def _write_exact(self, given: GivenGradient, exact: ScatterUnderWay, output: Tensor) -> None:
        exact.write_sums(output)
        self._record(given, sum(self._sizes))

    def _sum_exempt(self, rows: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], int]:
        """Return the sums of this rank's parts of the parameters that are exempt from compression, and the bytes
        sent."""
        if not self._exempt:
            return [], 0
        exempt = torch.cat([rows[:, start:end] for start, end in self._exempt], dim=1).contiguous()
        sums = exempt.new_empty(exempt.shape[1])
        with ACTIVITY.doing("all-to-all over dp, exempt numbers", waits="dp"):
            sent_bytes = self._exact(sums, exempt.view(-1), group)
        return list(sums.split([end - start for start, end in self._exempt])), sent_bytes

    def _begin_selected(
        self, given: GivenGradient, wanted: list[int], sent_bytes: int, group: dist.ProcessGroup
    ) -> ScatterUnderWay:
        """Agree with the other ranks on the index, and start to send the selected numbers.

        Args:
            given: this rank's gradient.
            wanted: how many numbers to select of each compressed parameter.
            sent_bytes: bytes that this rank sent before.
            group: the ranks.
        """
        world, rank, width = len(given.rows), dist.get_rank(group), sum(self._owned)
        exempt, exempt_bytes = self._sum_exempt(given.rows, group)
        agreed, agreed_bytes = self._agree(given, wanted, group)
        borders = [owner * width for owner in range(world + 1)]
        counts = counts_between(agreed.positions, borders)
        indices = [
            part - start
            for part, start in zip(agreed.index.split(counts_between(agreed.index, borders)), borders, strict=False)
        ]
        numbers = torch.cat(agreed.integers)[agreed.order]
        messages = [
            self._code.write(part, places - start, values, width)
            for part, places, values, start in zip(
                indices, agreed.positions.split(counts), numbers.split(counts), borders, strict=False
            )
        ]
        lengths = [len(message) for message in messages]
        incoming = messages[0].new_empty(world * lengths[rank])
        work = begin_all_to_all(incoming, torch.cat(messages), group, [lengths[rank]] * world, lengths)
        sent_bytes += exempt_bytes + agreed_bytes + 4 * (sum(lengths) - lengths[rank])
        if not self._code.loses_numbers:
            read = partial(self._read, incoming, indices[rank], world)
            return ScatterUnderWay(sent_bytes, work, partial(self._write_selected, given, agreed, exempt, read))
        with ACTIVITY.doing("all-to-all over dp, chosen numbers", waits="dp"):
            work.wait()
        sums = self._read(incoming, indices[rank], world)
        sums.decoded, bitmap_bytes = self._all_decoded(sums.decoded, indices, group)
        write_sums = partial(self._write_selected, given, agreed, exempt, lambda: sums)
        return ScatterUnderWay(sent_bytes + bitmap_bytes, OverlappedWork(None, incoming.device), write_sums)

    def _agree(self, given: GivenGradient, wanted: list[int], group: dist.ProcessGroup) -> tuple[_Agreed, int]:
        """Return this rank's numbers and the index, and the bytes that this rank sent. Arguments as of
        `_begin_selected`."""
        world, width = len(given.rows), sum(self._owned)
        selected = self._select(given, wanted)
        quanta = agree_quanta(selected.values, world, group)
        integers = [(part / quantum).round_().int() for part, quantum in zip(selected.values, quanta, strict=True)]
        positions, order = torch.cat(self._by_owner(selected.positions, width)).sort()
        with ACTIVITY.doing("index over dp", waits="dp"):
            index, index_bytes = agreed_index(self._code.form, positions, world * width, group)
        agreed = _Agreed(selected, integers, quanta, positions, order, index)
        return agreed, index_bytes + _ring_bytes(len(quanta), world)

    def _write_selected(
        self, given: GivenGradient, agreed: _Agreed, exempt: list[Tensor], read: Callable[[], _Sums], output: Tensor
    ) -> None:
        """Write the sums of this rank's part to `output`, and what was not sent to the residuals.

        Args:
            given: this rank's gradient.
            agreed: this rank's numbers and the index.
            exempt: sums of the parameters that are exempt from compression.
            read: returns the sums of the selected numbers, which have arrived.
            output: [part]; written to.
        """
        sums = read()
        flat = torch.zeros(sum(self._owned), device=output.device)
        flat[sums.index] = sums.integers.float()
        for (start, end), part, quantum in zip(self._compressed, flat.split(self._owned), agreed.quanta, strict=True):
            torch.mul(part, quantum, out=output[start:end])
        for (start, end), part in zip(self._exempt, exempt, strict=True):
            output[start:end] = part
        arrived = torch.empty_like(agreed.order, dtype=torch.bool)
        arrived[agreed.order] = self._code.arrived(agreed.index, agreed.positions, sums.decoded)
        parts = arrived.split([len(places) for places in agreed.selected.positions])
        places = [part[there] for part, there in zip(agreed.selected.positions, parts, strict=True)]
        sent = [
            part[there].float() * quantum
            for part, there, quantum in zip(agreed.integers, parts, agreed.quanta, strict=True)
        ]
        self._keep(agreed.selected, places, sent)
        self._record(given, len(agreed.positions))

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

    def _read(self, incoming: Tensor, index: Tensor, world: int) -> _Sums:
        """Return the sums of this rank's part at the positions of the index.

        Args:
            incoming: the messages of all ranks, one after the other.
            index: positions of the index in this rank's compressed numbers.
            world: number of ranks.
        """
        total = incoming.view(world, -1).sum(0, dtype=torch.int32)
        return _Sums(index, *self._code.read(total, index, sum(self._owned)))

    def _all_decoded(self, decoded: Tensor, indices: list[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, int]:
        """Return whether the sum at each position of the whole index was decoded, and the bytes that this rank sent.

        Args:
            decoded: whether this rank decoded the sums of its own part.
            indices: for each owner, the positions of the index in its compressed numbers.
            group: the ranks.
        """
        # The bit at the end keeps the message of an owner with an empty index from being empty.
        bitmaps, sent_bytes = gather(pack_bits(torch.cat([decoded, decoded.new_ones(1)])), group)
        flags = [unpack_bits(bits, len(part)) for bits, part in zip(bitmaps, indices, strict=True)]
        return torch.cat(flags), sent_bytes


@dataclass(frozen=True)
class _Agreed:
    """The numbers that a rank sends in a sum, and the index on which all ranks have agreed."""

    selected: SelectedNumbers
    integers: list[Tensor]
    """The selected numbers of each parameter as multiples of its quantum, int32."""
    quanta: list[float]
    """Quantum of each parameter, equal on all ranks."""
    positions: Tensor
    """Positions of this rank's numbers in the compressed numbers of all owners, ascending."""
    order: Tensor
    """For each of these, its place in the selected numbers of all parameters."""
    index: Tensor
    """The positions of all ranks."""


@dataclass
class _Sums:
    """The sums of the numbers that a rank owns."""

    index: Tensor
    """Positions of the index in this rank's compressed numbers."""
    integers: Tensor
    """Sums at these positions, int32, multiples of the quanta."""
    decoded: Tensor
    """Whether each sum was decoded; once ranks have told each other, those of the whole index."""


def _ring_bytes(numbers: int, world: int) -> int:
    return 2 * (world - 1) * 4 * numbers // world
