"""The codec of low rank: settings, bytes and state of PowerSGD."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.records.plan.gradient_codec import (
    FULL_BYTES,
    ROTATED_SCALE_BYTES,
    VALUE_BYTES,
    CodecRate,
    GradientCodec,
    Layers,
)

Remainder = Literal["none", "int2", "int1"]
MEASURED_RANK = 4
"""Rank of the products whose seconds a probe measures (`codec_s.power_sgd`)."""
WARMUP_SHARE = 0.1
"""Share of a run's steps that are warm-up steps of low rank, as torch advises for its hook."""
AUTO_BYTES: dict[Remainder, float] = {"none": 0.25, "int2": 0.98 / 3, "int1": 0.6 / 3}
"""Remainder -> most bytes of a message for each number of a matrix with `rank: auto`. Of four ranks, each then sends at
most 0.375, 0.49 and 0.30 bytes for a number, where the matrix is wide enough for a column."""


def square_width(rows: int, columns: int) -> float:
    """Return the side of a square matrix that a low-rank product shrinks by the same factor as a rows × columns matrix:
    rank r replaces m·n numbers by r·(m + n)."""
    return 2 * rows * columns / (rows + columns)


class PowerSgd(GradientCodec):
    """Codec PowerSGD: each matrix is sent as a product of two thin matrices (Vogels et al. 2019) and, with a remainder,
    what the product leaves out as integers of 1 or 2 bits."""

    lossy = may_raise_loss = True
    auto_settings = {}
    measured_as = "power_sgd"
    later_fields = frozenset({"remainder"})

    mode: Literal["power_sgd"]
    """Each matrix is sent as a product of two thin ones, whose numbers are in bf16; the approximation error is added to
    the next gradient."""
    rank: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Number of columns of the thin matrices. auto: for each matrix the most with which a message has at most 0.25
    bytes for each number of the matrix, with remainder int2 0.327, with int1 0.2: a 16th of the side of a square
    matrix, with a remainder about a 60th; but at least 1."""
    remainder: Remainder = "none"
    """How the part of the gradient that the product leaves out is sent. none: not in this step. int2, int1: with 2 bits
    or 1 bit for each number, in rotated blocks of 256 numbers with a scale each."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly. Default: a tenth of the run's steps, which is
    never less than the warm-up of the learning rate."""
    min_compression: float = Field(default=2.0, ge=1)
    """A matrix that the codec shrinks by less than this factor is summed exactly."""
    layers: Layers = "all"
    """Parameters that are compressed, as in mode bf16."""

    @property
    def remainder_bits(self) -> int:
        """Return the bits of each number of the remainder; 0 without one."""
        return 0 if self.remainder == "none" else int(self.remainder.removeprefix("int"))

    @property
    def remainder_bytes(self) -> float:
        """Return the bytes of a message that the remainder takes for each number of a matrix."""
        return self.remainder_bits / 8 + ROTATED_SCALE_BYTES if self.remainder_bits else 0.0

    @property
    def rates(self) -> tuple[CodecRate, ...]:
        return ("power_sgd", "rotated") if self.remainder_bits else ("power_sgd",)

    def rank_of(self, width: float) -> int:
        """Return the rank of the product for a square matrix, or for one that a product shrinks by the same factor.

        Args:
            width: side of the square matrix, as `square_width` returns it.
        """
        if self.rank != "auto":
            return self.rank
        return max(1, int((AUTO_BYTES[self.remainder] - self.remainder_bytes) * width / (2 * VALUE_BYTES["bf16"])))

    def bytes_at(self, width: float) -> float:
        """Return the bytes of a message for each number of a matrix.

        Args:
            width: side of a square matrix that a product shrinks by the same factor.
        """
        return 2 * VALUE_BYTES["bf16"] * self.rank_of(width) / width + self.remainder_bytes

    def compresses(self, rows: int, columns: int) -> bool:
        """Return whether the codec compresses a matrix: the matrix must shrink by the factor `min_compression`, and
        have at least as many rows and as many columns as the product's rank."""
        width = square_width(rows, columns)
        fits = self.rank_of(width) <= min(rows, columns)
        return fits and self.bytes_at(width) * self.min_compression <= FULL_BYTES

    def number_bytes(self, world: int, dim: float) -> float:
        # For a square matrix of width `dim`, which is sent in fp32 where a product would be longer.
        return min(float(FULL_BYTES), self.bytes_at(dim))

    def all_to_all_share(self, world: int, dim: float) -> float:
        # The first factor is all-reduced; the second one and the remainder go to owners and back.
        if self.bytes_at(dim) > FULL_BYTES:
            return 0.0  # sent in fp32, in an all-reduce
        thin = self.bytes_at(dim) - self.remainder_bytes
        return 0.5 * (thin / 2 + self.remainder_bytes) / self.bytes_at(dim)

    def rounds(self, buckets: int, world: int) -> float:
        # The factors, one after the other; what is exempt travels with the first, the remainder with the second.
        return 2

    def more_flop(self, width: float) -> float:
        # Five products of 2·rank FLOP for each number: the residual and the gradient with Q, their sum with P, and P
        # with the Q of this rank and with the sum of all Q. On one core they explain the time up to rank 128.
        return 10.0 * max(0, self.rank_of(width) - MEASURED_RANK)

    def state_bytes(self, dim: int) -> float:
        # Besides the residual: both factors, and the initial directions, to which a reset returns.
        return FULL_BYTES * (1 + 3 * self.rank_of(dim) / dim)

    def why_no_matrices(self, dim: int, width: float) -> str | None:
        if self.bytes_at(width) * self.min_compression <= FULL_BYTES:
            return None
        return f"a matrix of a width of {dim} does not shrink to 1/{self.min_compression:g}"

    def for_run(self, steps: int) -> PowerSgd:
        """Return the codec with the default of `warmup_steps` for a run that began with `steps` steps, if none is set.

        The share is that of torch's documentation (`PowerSGDState`), which also advises to wait for the end of the
        learning rate's warm-up; that ends within a tenth of the steps (`Optimizer.warmup`).
        """
        if self.warmup_steps is not None:
            return self
        return self.model_copy(update={"warmup_steps": math.ceil(WARMUP_SHARE * steps)})
