"""A reduce-scatter of the largest numbers only: each rank sends each owner a choice of the numbers whose sums that
rank owns, and keeps the rest for its next choice. The owner adds them up in fp32; nothing is sent on from there.

At N ranks a number of the gradient costs (N−1)/N·b bytes, b being what a message has for each.

What is chosen from is a whole parameter: the ranks' parts of it stand between those of other parameters in the flat
gradient, and are taken out of it. So a rank's choice is what it would be if the parameter were not sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import ALIGNMENT, decode, encode, rounded
from hpctrain.compress.codecs.values import ValueCode
from hpctrain.compress.collectives.reduce_scatter import FlatGradientLayout, ShardedParameter
from hpctrain.compress.collectives.sparse_exchange import exchange
from hpctrain.compress.collectives.sparse_scatter_state import SparseScatterState
from hpctrain.compress.reducers.sparse import SparseSettings, message_scales
from hpctrain.compress.select.selectors import seed_of, select_with_values

_FULL_BYTES = 4


class SparseReduceScatter:
    """The reduce-scatter of one part of a stage; parameters that are not compressed are summed exactly.

    Where any rank's gradient is not finite, all owners get sums that are no numbers, and nothing that is kept changes.
    """

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], first: int, steps: SparseScatterState,
        settings: SparseSettings,
    ) -> None:  # fmt: skip
        """
        Args:
            pieces: in the order in which they stand in the flat gradient.
            compressed: positions of those to compress, ascending; at least one.
            first: how many compressed parameters of the stage come before those of this part.
            steps: of the stage.
            settings: how numbers are chosen and sent; there is only one way of exchanging them.
        """
        self.steps = steps
        part = self._flat = FlatGradientLayout(pieces, compressed)
        self._part, self._compressed, self._exempt = part.numbers, part.compressed, part.exempt
        self._sizes = [math.prod(pieces[index].shape) for index in compressed]
        """Of the compressed parameters, without what fills them up."""
        self._owned = [pieces[index].owned for index in compressed]
        self._first = first
        self._settings = settings

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = self._flat.rows(gradient, world)
        step = self.steps.begin(gradient.device)
        stretches = [rows[:, start:end] for start, end in (*self._compressed, *self._exempt)]
        energies: list[float] = torch.stack(torch._foreach_norm(stretches)).double().square().tolist()
        wanted = self.steps.wanted(step, self._first, len(self._compressed))
        finite = all(math.isfinite(energy) for energy in energies)
        choice, whole = None, rows
        if finite and wanted is not None:
            choice = self._choose(rows, wanted, energies, step)
            messages = [self._message(choice, rows[owner], owner) for owner in range(world)]
        elif finite:
            whole = self._with_kept(rows) if self.steps.feedback.is_flush_step(step) else rows
            messages = [_bytes(row) for row in whole]
        else:
            # The others' are never empty: this says that there is nothing to add up.
            messages = [output.new_empty(0, dtype=torch.uint8)] * world
        own, messages[rank] = messages[rank], messages[rank][:0]
        arrived, sent = exchange(messages, group)
        arrived[rank] = own
        if any(message.numel() == 0 for message in arrived):
            self.steps.not_finite()
            output.fill_(math.nan)
            return sent
        if choice is None:
            self._add_whole(output, arrived)
            self._forget(step)
            count = sum(self._sizes)
        else:
            self._add(output, arrived, choice.of(rank), rank)
            self._keep(choice, rank)
            count = sum(positions.numel() for positions in choice.positions)
        self.steps.record_sent(count, sum(self._sizes), sum(energies[: len(self._compressed)]))
        if self.steps.counts.watches(step):
            self.steps.counts.observe(step, self._copies(rows), self._first)
        return sent

    def _copies(self, rows: Tensor) -> list[Tensor]:
        """Each compressed parameter by itself, [world · owned], fp32, in memory that the next call uses again."""
        world = rows.shape[0]
        parts = self.steps.memory(world * sum(self._owned), rows).split([world * owned for owned in self._owned])
        for part, (start, end) in zip(parts, self._compressed, strict=True):
            part.view(world, -1).copy_(rows[:, start:end])
        return list(parts)

    def _keys(self) -> list[str]:
        return [str(self._first + index) for index in range(len(self._compressed))]

    def _choose(self, rows: Tensor, wanted: list[int], energies: list[float], step: int) -> _Choice:
        add_to, settings = self.steps.feedback.add_to, self._settings
        with_kept = [add_to(key, copy) for key, copy in zip(self._keys(), self._copies(rows), strict=True)]
        found = [
            select_with_values(a, k, settings.selector, seed_of(settings.seed, step, self._first + index))
            for index, (a, k) in enumerate(zip(with_kept, wanted, strict=True))
        ]
        scales = message_scales(energies[: len(wanted)], self._sizes)
        return _Choice(with_kept, found, scales, self._compressed, rows.shape[0], settings.values)

    def _message(self, choice: _Choice, row: Tensor, owner: int) -> Tensor:
        """To an owner: what is not compressed, the scales, the chosen numbers."""
        exempt = torch.cat([row[start:end] for start, end in self._exempt]) if self._exempt else row[:0]
        positions, values = choice.of(owner)
        numbers = encode(positions, values, self._part, self._settings.values)
        return torch.cat([_bytes(exempt), _bytes(exempt.new_tensor(choice.scales)), numbers])

    def _add(self, output: Tensor, messages: list[Tensor], own: tuple[Tensor, Tensor], rank: int) -> None:
        """The sum of messages in the order of the ranks; of this rank's own numbers as they are."""
        output.zero_()
        exempt = [output[start:end] for start, end in self._exempt]
        borders = torch.tensor([*(start for start, _ in self._compressed), self._part], device=output.device)
        for sender, message in enumerate(messages):
            numbers, rest = _cut(message, sum(part.numel() for part in exempt))
            scales, rest = _cut(rest, len(self._compressed))
            positions, values = own if sender == rank else decode(rest, self._part)
            lengths = torch.searchsorted(positions, borders).diff()
            for part, more in zip(exempt, numbers.split([part.numel() for part in exempt]), strict=True):
                part += more
            output.index_add_(0, positions, values * scales.repeat_interleave(lengths))

    def _keep(self, choice: _Choice, rank: int) -> None:
        for key, a, positions, read in zip(
            self._keys(), choice.with_kept, choice.positions, choice.read(rank), strict=True
        ):
            self.steps.feedback.store_residual(key, a, positions, read)

    def _with_kept(self, rows: Tensor) -> Tensor:
        """Everything that this rank has to send."""
        whole = rows.clone()
        for key, copy, (start, end) in zip(self._keys(), self._copies(rows), self._compressed, strict=True):
            whole[:, start:end] = self.steps.feedback.add_to(key, copy).view(rows.shape[0], -1)
        return whole

    def _forget(self, step: int) -> None:
        if self.steps.feedback.is_flush_step(step):
            for key in self._keys():
                self.steps.feedback.forget(key)

    @staticmethod
    def _add_whole(output: Tensor, messages: list[Tensor]) -> None:
        output.zero_()
        for message in messages:
            output += _cut(message, output.numel())[0]


class _Choice:
    """What is sent of the parameters of a part, by the owners of its sums."""

    def __init__(
        self, with_kept: list[Tensor], found: list[tuple[Tensor, Tensor]], scales: list[float],
        stretches: list[tuple[int, int]], world: int, code: ValueCode,
    ) -> None:  # fmt: skip
        """
        Args:
            with_kept: each parameter as it is chosen from, [world · owned].
            found: what is sent of each, positions and values; the memory of the values is used.
            scales: of each; numbers are divided by them on the wire.
            stretches: where each begins and ends in the part that an owner has.
            world: how many owners.
            code: of the wire.
        """
        self.with_kept = with_kept
        self.positions = [places for places, _ in found]
        self.scales = scales
        self._code = code
        self._places: list[list[Tensor]] = []
        """By parameter and owner, in the owner's part."""
        self._values: list[tuple[Tensor, ...]] = []
        """As they go over the wire, by parameter and owner."""
        for (places, values), scale, (start, end) in zip(found, scales, stretches, strict=True):
            size = end - start
            borders = torch.arange(world + 1, device=places.device) * size
            lengths = torch.searchsorted(places, borders).diff().tolist()
            self._places.append([
                part + (start - owner * size) for owner, part in enumerate(places.split(lengths))
            ])  # fmt: skip
            self._values.append(values.div_(scale).split(lengths))

    def of(self, owner: int) -> tuple[Tensor, Tensor]:
        """Positions, ascending, and values that this owner is to add up, of all parameters."""
        return torch.cat([parts[owner] for parts in self._places]), torch.cat([parts[owner] for parts in self._values])

    def read(self, rank: int) -> list[Tensor]:
        """What owners read of each parameter; this rank, of its own part, reads all of it."""
        by_owner = []
        for owner in range(len(self._values[0])):
            parts = [values[owner] for values in self._values]
            sent = torch.cat(parts)
            read = sent if owner == rank else rounded(sent, self._code)
            by_owner.append(read.split([part.numel() for part in parts]))
        return [torch.cat(parts) * scale for parts, scale in zip(zip(*by_owner, strict=True), self.scales, strict=True)]


def _bytes(numbers: Tensor) -> Tensor:
    """Numbers in fp32, filled up to the alignment of a message."""
    data = numbers.contiguous().view(torch.uint8)
    missing = -data.numel() % ALIGNMENT
    return torch.cat([data, data.new_zeros(missing)]) if missing else data


def _cut(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many numbers as `_bytes` wrote them, and what is behind them."""
    size = count * _FULL_BYTES
    return message[:size].view(torch.float32), message[size + -size % ALIGNMENT :]
