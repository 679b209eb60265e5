"""Scales that gradients are divided by before they are rounded, so that rounding errors are small where gradients are.

A rotation spreads the rounding errors of a block evenly over its numbers. AdamW divides each number by the root of its
mean square, so an error that is small beside the large numbers of a block becomes a large step of the small ones. After
a division by scales that follow the rows and columns of each matrix, all numbers of a block are about equally large.
Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, section 3) factors mean squares into rows and columns in this way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError

EVERY = 16
"""Sums after which the scales follow the gradients again."""
NEWEST = 0.5
"""Weight of the newest gradient in a mean square."""
FLOOR = 1e-4
"""Least mean square of a row or column, relative to that of its matrix: a row that had no gradient yet may get one."""
_INITIAL = 1.0
"""Factor of a gradient of which rank 0 has not observed any."""
_TINY = 1e-12
"""Largest factor that is taken for that of a gradient of zeros."""
_FACTORS, _SUMS = "factors.", "sums."


class GradientScales:
    """The scales of the gradients of one reducer.

    The scale of a number is the product of a factor of its row and one of its column; a vector has one scale. In the
    sums number 1, 2, 4, 8 and 16, and in each `EVERY`-th one after, rank 0 computes factors from its own gradient and
    broadcasts them; they hold from the next sum on. So all ranks have the same scales, although their gradients and
    their processors differ. In the first sum after a start, all ranks take over the factors of rank 0, because some may
    have lost theirs. Counts of sent bytes leave these few bytes out.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Begin with scales of 1.

        Args:
            group: ranks that sum gradients; None: this process alone.
        """
        self._group = group
        self._of: dict[Hashable, _Factors] = {}
        self._loaded: dict[str, Tensor] = {}

    def begin(self, key: Hashable, names: Sequence[object], gradients: Sequence[Tensor]) -> list[Tensor] | None:
        """Begin a sum; return the scales for it, or None if they are those of the last sum with this key. Collective in
        some sums, in the same ones on all ranks.

        Args:
            key: key of the sum, the same in every step; gradients with a key are summed together.
            names: names of the gradients in the state.
            gradients: this rank's gradients, fp32, whose last dimension is that of the columns.

        Returns:
            For each gradient, tensors that can be broadcast to its shape: its scales.

        Raises:
            CheckpointError: loaded factors are of a gradient of another shape.
        """
        changed = key not in self._of
        if changed:
            self._of[key] = self._agreed(self._first(names, gradients))
        factors = self._of[key]
        if factors.pending is not None:
            factors.present, factors.pending, changed = factors.pending.wait(), None, True
        factors.sums += 1
        if _is_observed(factors.sums):
            factors.pending = self._observe(factors, gradients)
        return factors.scales(gradients) if changed else None

    def _observe(self, factors: _Factors, gradients: Sequence[Tensor]) -> _Broadcast:
        """Begin to broadcast the factors that rank 0 computes."""
        alone = self._is_alone()
        new = torch.empty_like(factors.present)
        if alone or dist.get_rank(self._group) == 0:
            new.copy_(factors.observed([_factors_of(gradient) for gradient in gradients]))
        work = None if alone else dist.broadcast(new, group=self._group, group_src=0, async_op=True)
        return _Broadcast(new, work)

    def _is_alone(self) -> bool:
        return self._group is None or dist.get_world_size(self._group) == 1

    def _agreed(self, factors: _Factors) -> _Factors:
        """Return the factors that rank 0 starts with. Collective."""
        if not self._is_alone():
            count = factors.present.new_tensor([factors.sums])
            start = torch.cat([factors.present, count])
            dist.broadcast(start, group=self._group, group_src=0)
            factors.present, factors.sums = start[:-1], int(start[-1])
        return factors

    def _first(self, names: Sequence[object], gradients: Sequence[Tensor]) -> _Factors:
        counts = [_factor_count(gradient) for gradient in gradients]
        first = _Factors(names, counts, gradients[0].new_full((sum(counts),), _INITIAL))
        for name, part in zip(names, first.present.split(counts), strict=True):
            loaded = self._loaded.pop(f"{_FACTORS}{name}", None)
            if loaded is None:
                continue
            if loaded.numel() != part.numel():
                raise CheckpointError(
                    f"{_FACTORS}{name}: found {loaded.numel()} factors for a gradient with {part.numel()} rows and "
                    "columns; allowed: a state saved with the same parallel degrees; drop it to start afresh"
                )
            part.copy_(loaded)
            first.sums = int(self._loaded.pop(f"{_SUMS}{name}", torch.tensor(0)))
        return first

    def state(self) -> dict[str, Tensor]:
        """Return the factors that the next sums use, 'factors.NAME' -> [rows + columns], and 'sums.NAME' -> how many
        sums were made. Waits for a broadcast under way."""
        state = dict(self._loaded)
        for factors in self._of.values():
            newest = factors.present if factors.pending is None else factors.pending.wait()
            for name, part in zip(factors.names, newest.split(factors.counts), strict=True):
                state |= {f"{_FACTORS}{name}": part, f"{_SUMS}{name}": torch.tensor(factors.sums)}
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; factors that are missing start at 1."""
        self._of = {}
        self._loaded = {
            key: tensor.detach().clone() for key, tensor in state.items() if key.startswith((_FACTORS, _SUMS))
        }


@dataclass(frozen=True)
class _Broadcast:
    """Factors that are on their way from rank 0."""

    factors: Tensor
    work: dist.Work | None
    """None: this process is alone."""

    def wait(self) -> Tensor:
        """Return the factors when they have arrived."""
        if self.work is not None:
            self.work.wait()
        return self.factors


@dataclass
class _Factors:
    """Factors of the gradients that are summed together."""

    names: Sequence[object]
    counts: list[int]
    """Count of factors of each gradient."""
    present: Tensor
    """fp32 [sum of `counts`]: for each gradient, the factors of its rows, then those of its columns."""
    pending: _Broadcast | None = field(default=None)
    sums: int = 0
    """How many sums have begun."""

    def observed(self, new: Sequence[Tensor]) -> Tensor:
        """Return the next factors: of each gradient the present ones and the new ones, each with its weight. A gradient
        that is zero or not finite keeps its present ones.

        Args:
            new: for each gradient, its factors.
        """
        factors = []
        for present, newest in zip(self.present.split(self.counts), new, strict=True):
            usable = bool(newest.isfinite().all()) and bool((newest > _TINY).all())
            if usable and not bool((present == _INITIAL).all()):
                newest = newest.square().lerp(present.square(), 1 - NEWEST).sqrt()
            # In bf16, so that the product of two factors is the same number on every processor.
            factors.append(newest.bfloat16().float() if usable else present)
        return torch.cat(factors)

    def scales(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return for each gradient its scales, which can be broadcast to its shape."""
        scales = []
        for gradient, part in zip(gradients, self.present.split(self.counts), strict=True):
            if gradient.dim() < 2:
                scales.append(part)
                continue
            rows, columns = part.split([part.numel() - gradient.shape[-1], gradient.shape[-1]])
            scales.append(rows.view(*gradient.shape[:-1], 1) * columns)
        return scales


def _is_observed(sums: int) -> bool:
    return sums % EVERY == 0 or (sums < EVERY and sums & (sums - 1) == 0)


def _factor_count(gradient: Tensor) -> int:
    return 1 if gradient.dim() < 2 else gradient.numel() // gradient.shape[-1] + gradient.shape[-1]


def _factors_of(gradient: Tensor) -> Tensor:
    """Return the factors of the rows of a gradient, then those of its columns, whose products are near the root mean
    squares of its numbers; of a vector, its root mean square."""
    if gradient.dim() < 2:
        return torch.linalg.vector_norm(gradient).div(gradient.numel() ** 0.5).view(1)
    columns = gradient.shape[-1]
    rows = gradient.numel() // columns
    by_row = torch.linalg.vector_norm(gradient, dim=-1).flatten().square() / columns
    by_column = torch.linalg.vector_norm(gradient, dim=tuple(range(gradient.dim() - 1))).square() / rows
    mean = by_row.mean()
    return torch.cat([by_row.clamp_min(FLOOR * mean), (by_column / mean).clamp_min(FLOOR)]).sqrt()
