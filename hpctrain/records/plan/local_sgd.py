"""The codec of local SGD: settings, bytes and state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.plan.gradient_codec import FULL_BYTES, SCALE_BYTES, CodecRate, GradientCodec

OuterValues = Literal["fp32", "int8", "int4"]


class LocalSteps(GradientCodec):
    """Local SGD: replicas train independently and combine their weights every few steps (DiLoCo, Douillard et al.
    2023)."""

    sums_gradients = False
    later_fields = frozenset({"values", "parts", "overlap_steps"})

    mode: Literal["local_steps"]
    """Replicas train independently and combine the changes of their weights every few steps (outer sync)."""
    every: int = Field(default=10, ge=1)
    """Steps between two outer syncs."""
    outer_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the outer optimizer: factor on the mean of the changes of the replicas' weights. Default: 0.7
    with `every` from 50 on, else 1."""
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer. Default: 0.9 with `every` from 50 on, else 0."""
    values: OuterValues = "fp32"
    """Precision in which the changes of weights are sent. int8, int4: as integers with a scale for each 256 of them;
    the rounding error is added to the next change."""
    parts: int = Field(default=1, ge=1)
    """Number of parts of the parameters, each of which has outer syncs of its own, at equal distances within `every`
    steps: the messages of a sync are that many times shorter."""
    overlap_steps: int = Field(default=0, ge=0)
    """Steps during which the messages of an outer sync travel while replicas go on training; fewer than `every`."""

    @model_validator(mode="after")
    def _syncs_fit(self) -> LocalSteps:
        if self.parts > self.every:
            raise ValueError(f"parts: found {self.parts} with every {self.every}; allowed: at most `every`")
        if self.overlap_steps >= self.every:
            raise ValueError(
                f"overlap_steps: found {self.overlap_steps} with every {self.every}; allowed: fewer than `every`"
            )
        return self

    @property
    def nesterov(self) -> tuple[float, float]:
        """Return (learning rate, momentum) of the outer optimizer."""
        lr, momentum = next(settings for least, *settings in _NESTEROV if self.every >= least)
        return (
            lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
        )

    @property
    def values_bits(self) -> int | None:
        """Return the bits of an integer on the wire; None if changes are sent in fp32."""
        return None if self.values == "fp32" else int(self.values.removeprefix("int"))

    @property
    def rates(self) -> tuple[CodecRate, ...]:
        return () if self.values_bits is None else ("quantized",)

    def number_bytes(self, world: int, dim: float) -> float:
        sent = FULL_BYTES if self.values_bits is None else self.values_bits / 8 + SCALE_BYTES
        return sent / self.every

    def all_to_all_share(self, world: int, dim: float) -> float:
        return 0.0 if self.values_bits is None else 0.5

    def rounds(self, buckets: int, world: int) -> float:
        return buckets / self.every

    def passes(self, world: int) -> float:
        return 1 / self.every

    def state_bytes(self, dim: int) -> float:
        # The weights at the last outer sync, the outer velocity, and the residual of integers. Of a part under way,
        # its weights and their change.
        under_way = 2 / self.parts if self.overlap_steps else 0.0
        return FULL_BYTES * (2 + (self.values_bits is not None) + under_way)


_NESTEROV = ((50, 0.7, 0.9), (1, 1.0, 0.0))
"""(Fewest steps between outer syncs, learning rate, Nesterov momentum) of the outer optimizer's defaults, the most
steps first."""
