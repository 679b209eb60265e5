"""A top-k reduce-scatter for a sharded state: each rank owns a part of the gradient, and gets the numbers of its part
that other ranks selected.

The sender keeps the numbers that it did not select in its residuals. The owner adds up what it receives in fp32 and
sends nothing on.

At N ranks, each rank sends (N−1)/N·b bytes per number of the gradient, where b is the length in bytes of a rank's
encoded selection, divided by the count of the gradient's numbers.

Numbers are selected over a whole parameter, whose shards are first gathered out of the flat gradient. So a rank selects
the same numbers as if the parameter were not sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import ALIGNMENT, ValueCode, decode, encode, rounded
from hpctrain.compress.collectives.exchange import Exchange
from hpctrain.compress.collectives.reduce_scatter import (
    FlatGradientLayout,
    ReduceScatter,
    ScatterUnderWay,
    ShardedParameter,
)
from hpctrain.compress.collectives.sparse_state import SparseSettings, SparseState
from hpctrain.compress.reducers.sparse import OwnerParts, message_scales

_FULL_BYTES = 4


class SparseReduceScatter(ReduceScatter):
    """The sparse reduce-scatter of the gradients of one `fully_shard` module of a stage, with error feedback.

    Parameters that are exempt from compression are summed exactly. If any rank's gradient is not finite, every rank
    gets NaN for the shard that it owns, and no residual changes.
    """

    residuals: SparseState

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], first: int, state: SparseState,
        settings: SparseSettings,
    ) -> None:  # fmt: skip
        """Create the reduce-scatter before the first step.

        Args:
            pieces: the module's parameters, in the order of the flat gradient.
            compressed: indices in `pieces` of the parameters to compress, ascending; at least one.
            first: number of compressed parameters in the stage's earlier `fully_shard` modules.
            state: state that all reduce-scatters of the stage share.
            settings: how numbers are selected and encoded.
        """
        self.residuals = state
        part = self._flat = FlatGradientLayout(pieces, compressed)
        self._part, self._compressed, self._exempt = part.numbers, part.compressed, part.exempt
        self._sizes = [math.prod(pieces[index].shape) for index in compressed]
        """Count of numbers of each compressed parameter, without padding."""
        self._owned = [pieces[index].owned for index in compressed]
        self._first = first
        self._settings = settings

    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        given = self._given(gradient, world)
        wanted = self.residuals.wanted(given.step, self._first, len(self._compressed))
        choice = None
        if given.is_finite and wanted is not None:
            scales = message_scales(given.energies[: len(wanted)], self._sizes)
            selected = self._select(given, wanted)
            choice = _Choice(selected, scales, self._compressed, world, self._settings.values)
            messages = [self._message(choice, given.rows[owner], owner) for owner in range(world)]
        elif given.is_finite:
            flushes = self.residuals.feedback.is_flush_step(given.step)
            messages = [_bytes(row) for row in (self._corrected(given.rows) if flushes else given.rows)]
        else:
            # Empty messages tell the owners that this gradient is not finite; other messages are never empty.
            messages = [gradient.new_empty(0, dtype=torch.uint8)] * world
        own_message, messages[rank] = messages[rank], messages[rank][:0]
        exchange = Exchange(messages, group)
        write_sums = partial(self._write_sums, given, choice, exchange, own_message, rank)
        return ScatterUnderWay(exchange.sent_bytes, exchange, write_sums)

    def _given(self, gradient: Tensor, world: int) -> GivenGradient:
        """Return a flat gradient, [world · part], with what is known of it before the sum."""
        rows = self._flat.rows(gradient, world)
        stretches = [rows[:, start:end] for start, end in (*self._compressed, *self._exempt)]
        energies: list[float] = torch.stack(torch._foreach_norm(stretches)).double().square().tolist()
        return GivenGradient(rows, self.residuals.begin(gradient.device), energies)

    def _write_sums(
        self, given: GivenGradient, choice: _Choice | None, exchange: Exchange, own_message: Tensor, rank: int,
        output: Tensor,
    ) -> None:  # fmt: skip
        """Write the sums of this rank's part to `output`, and what was not sent to the residuals.

        Args:
            given: this rank's gradient.
            choice: the numbers that this rank selected of it; None: all.
            exchange: the messages, which have arrived.
            own_message: the message of this rank to itself.
            rank: this rank.
            output: [part]; written to.
        """
        arrived = exchange.messages()
        arrived[rank] = own_message
        if any(message.numel() == 0 for message in arrived):
            self._give_up(None if choice is None else choice.selected, output)
            return
        if choice is None:
            self._add_whole(output, arrived)
            self._forget(given.step)
            count = sum(self._sizes)
        else:
            self._add(output, arrived, choice.of(rank), rank)
            self._keep(choice.selected, choice.selected.positions, choice.read(rank))
            count = sum(positions.numel() for positions in choice.selected.positions)
        self._record(given, count)
        if self.residuals.counts.watches(given.step):
            memory, copies = self._copies(given.rows)
            self.residuals.counts.observe(given.step, copies, self._first)
            self.residuals.buffers.give_back(memory)

    def _record(self, given: GivenGradient, count: int) -> None:
        """Record the figures of a sum for which this rank sent `count` numbers of the compressed parameters."""
        self.residuals.record_sent(count, sum(self._sizes), sum(given.energies[: len(self._compressed)]))

    def _give_up(self, selected: SelectedNumbers | None, output: Tensor) -> None:
        """Write NaN to `output`, because some rank's gradient is not finite."""
        self.residuals.not_finite()
        if selected is not None:
            self.residuals.buffers.give_back(selected.memory)
        output.fill_(math.nan)

    def _copies(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a buffer of the state's `buffers`, and in it a copy of each compressed parameter's gradient, [world ·
        owned], fp32; `owned` is the count of the parameter's numbers, with padding, of which each rank owns the sum.

        Args:
            rows: [world, numbers], the flat gradient by owner.
        """
        world = rows.shape[0]
        memory = self.residuals.buffers.take(world * sum(self._owned), rows)
        parts = memory.split([world * owned for owned in self._owned])
        for part, (start, end) in zip(parts, self._compressed, strict=True):
            part.view(world, -1).copy_(rows[:, start:end])
        return memory, list(parts)

    def _keys(self) -> list[str]:
        return [str(self._first + index) for index in range(len(self._compressed))]

    def _select(self, given: GivenGradient, wanted: list[int]) -> SelectedNumbers:
        """Select about `wanted` numbers of each compressed parameter, out of the gradient plus the residual."""
        memory, copies = self._copies(given.rows)
        add_to = self.residuals.feedback.add_to
        corrected = [add_to(key, copy) for key, copy in zip(self._keys(), copies, strict=True)]
        selected = [
            self._settings.select(a, k, given.step, self._first + index)
            for index, (a, k) in enumerate(zip(corrected, wanted, strict=True))
        ]
        return SelectedNumbers(memory, corrected, *map(list, zip(*selected, strict=True)))

    def _message(self, choice: _Choice, row: Tensor, owner: int) -> Tensor:
        """Return the message to an owner, uint8: its exempt numbers, the scales of the parameters, its selected
        numbers.

        Args:
            choice: the numbers that this rank selected.
            row: the numbers of the flat gradient that the owner owns.
            owner: the owner's rank.
        """
        exempt = torch.cat([row[start:end] for start, end in self._exempt]) if self._exempt else row[:0]
        positions, values = choice.of(owner)
        numbers = encode(positions, values, self._part, self._settings.values)
        return torch.cat([_bytes(exempt), _bytes(exempt.new_tensor(choice.scales)), numbers])

    def _add(self, output: Tensor, messages: list[Tensor], own_selection: tuple[Tensor, Tensor], rank: int) -> None:
        """Add up the messages in rank order, and write the sums to `output`. The numbers of this rank itself are added
        unrounded.

        Args:
            output: [part]; written to.
            messages: the messages to this rank, by sending rank.
            own_selection: positions and values that this rank selected of its own part.
            rank: this rank.
        """
        output.zero_()
        exempt = [output[start:end] for start, end in self._exempt]
        borders = torch.tensor([*(start for start, _ in self._compressed), self._part], device=output.device)
        for sender, message in enumerate(messages):
            numbers, selection = _cut(message, sum(part.numel() for part in exempt))
            scales, selection = _cut(selection, len(self._compressed))
            positions, values = own_selection if sender == rank else decode(selection, self._part)
            lengths = torch.searchsorted(positions, borders).diff()
            for part, more in zip(exempt, numbers.split([part.numel() for part in exempt]), strict=True):
                part += more
            output.index_add_(0, positions, values * scales.repeat_interleave(lengths))

    def _keep(self, selected: SelectedNumbers, positions: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Store what was not sent in the residuals.

        Args:
            selected: the selected numbers; its memory is free afterwards.
            positions: for each compressed parameter, the positions of the numbers that arrived.
            read: for each compressed parameter, these numbers as their owners read them.
        """
        for key, a, places, values in zip(self._keys(), selected.corrected, positions, read, strict=True):
            self.residuals.feedback.store_residual(key, a, places, values)
        self.residuals.buffers.give_back(selected.memory)

    def _corrected(self, rows: Tensor) -> Tensor:
        """Return the gradient plus this rank's residuals of the compressed parameters, as a new tensor.

        Args:
            rows: [owner, numbers]: the flat gradient, by the rank that owns the part.
        """
        whole = rows.clone()
        memory, copies = self._copies(rows)
        for key, copy, (start, end) in zip(self._keys(), copies, self._compressed, strict=True):
            whole[:, start:end] = self.residuals.feedback.add_to(key, copy).view(rows.shape[0], -1)
        self.residuals.buffers.give_back(memory)
        return whole

    def _forget(self, step: int) -> None:
        if self.residuals.feedback.is_flush_step(step):
            for key in self._keys():
                self.residuals.feedback.forget(key)

    @staticmethod
    def _add_whole(output: Tensor, messages: list[Tensor]) -> None:
        output.zero_()
        for message in messages:
            output += _cut(message, output.numel())[0]


class GivenGradient(NamedTuple):
    """This rank's gradient of a sum."""

    rows: Tensor
    """[world, numbers]: the flat gradient, by the rank that owns the sums."""
    step: int
    """Number of the step, counted from 1."""
    energies: list[float]
    """Squared norm of each parameter's gradient, the compressed parameters first."""

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.energies))


class SelectedNumbers(NamedTuple):
    """The numbers that a rank selected of each compressed parameter of a `fully_shard` module."""

    memory: Tensor
    """Buffer of `SparseState.buffers` that holds `corrected`."""
    corrected: list[Tensor]
    """Gradient plus residual of each parameter, [world · n]; a rank owns n numbers of the parameter."""
    positions: list[Tensor]
    """Positions in the parameter, [k], int64, ascending."""
    values: list[Tensor]
    """The numbers at these positions, [k], fp32."""


class _Choice:
    """The selected numbers of one `fully_shard` module's parameters, by the rank that owns them."""

    def __init__(
        self, selected: SelectedNumbers, scales: list[float], stretches: list[tuple[int, int]], world: int,
        code: ValueCode,
    ) -> None:  # fmt: skip
        """Divide the selected values by their scales and cut them by owner.

        Args:
            selected: the numbers to send; the values are overwritten.
            scales: for each parameter, what its values are divided by on the wire.
            stretches: start and end of each parameter in an owner's part.
            world: number of owners.
            code: precision of the values on the wire.
        """
        self.selected = selected
        self.scales = scales
        self._code = code
        self._parts = [
            OwnerParts(places, values.div_(scale), [owner * (end - start) for owner in range(world + 1)], start)
            for places, values, scale, (start, end) in zip(
                selected.positions, selected.values, scales, stretches, strict=True
            )
        ]
        """For each parameter, the positions within the owner's part and the values, divided by the scale."""

    def of(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return, of the selected numbers of all parameters, those that the rank `owner` owns, as two tensors [k].

        The first has their positions in the owner's part, ascending. The second has their values, each divided by the
        scale of its parameter on the wire.
        """
        positions = [parts.positions[owner] for parts in self._parts]
        return torch.cat(positions), torch.cat([parts.values[owner] for parts in self._parts])

    def read(self, rank: int) -> list[Tensor]:
        """Return for each parameter the selected values [k] as their owners read them: rounded to the precision of the
        message, except for the values that this rank (`rank`) owns itself and sends to nobody.
        """
        by_owner = []
        for owner, values in enumerate(zip(*(parts.values for parts in self._parts), strict=True)):
            sent = torch.cat(values)
            read = sent if owner == rank else rounded(sent, self._code)
            by_owner.append(read.split([part.numel() for part in values]))
        return [torch.cat(parts) * scale for parts, scale in zip(zip(*by_owner, strict=True), self.scales, strict=True)]


def _bytes(numbers: Tensor) -> Tensor:
    """Return the bytes of fp32 numbers, uint8, padded to a multiple of `ALIGNMENT`."""
    data = numbers.contiguous().view(torch.uint8)
    missing = -data.numel() % ALIGNMENT
    return torch.cat([data, data.new_zeros(missing)]) if missing else data


def _cut(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split a message, uint8 [bytes], into its first `count` numbers, fp32, and the bytes that follow. `_bytes` wrote
    the numbers, with padding after them, which is left out.
    """
    size = count * _FULL_BYTES
    return message[:size].view(torch.float32), message[size + -size % ALIGNMENT :]
