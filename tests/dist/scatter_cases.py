"""The reduce-scatters of sharded states that keep something back, by themselves; called by the cases beside it, on four
ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from processes import largest
from torch import Tensor

from hpctrain.compress.build import build_reduce_scatters
from hpctrain.compress.collectives.reduce_scatter import ShardedParameter, residual_metrics, residuals_of
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.rotated import RotatedIntegers

PARTS = [
    {"layers.0.up.weight": (90, 200), "layers.0.norm.weight": (63,), "layers.0.down.weight": (61, 90)},
    {"norm.weight": (63,)},
    {"head.weight": (130, 64)},
]
"""Sides that four ranks do not share evenly; a part without anything to compress."""
STEPS = 6


def of_rank(shape: tuple[int, ...], world: int) -> int:
    return -(-shape[0] // world) * math.prod(shape[1:])


def flat(tensors: list[Tensor], world: int) -> Tensor:
    """As torch's FSDP lays gradients out: for each rank its rows of every parameter, filled up with zeros."""
    owned = sum(of_rank(tensor.shape, world) for tensor in tensors)
    rows = torch.zeros(world, owned, dtype=tensors[0].dtype)
    start = 0
    for tensor in tensors:
        numbers = of_rank(tensor.shape, world)
        filled = torch.zeros(world * numbers, dtype=tensor.dtype)
        filled[: tensor.numel()] = tensor.flatten()
        rows[:, start : start + numbers] = filled.view(world, numbers)
        start += numbers
    return rows.flatten()


class Stage:
    """The scatters of a stage under a codec, and the sums that this rank owns."""

    def __init__(self, codec: dict[str, Any], world: int) -> None:
        pieces = [
            [ShardedParameter(name, torch.Size(shape), of_rank(shape, world)) for name, shape in part.items()]
            for part in PARTS
        ]
        spec = CodecSpec.model_validate({"codec": codec})
        self.reduce_scatters = build_reduce_scatters(spec, pieces, dist.group.WORLD, "cpu")
        self.world = world
        found = residuals_of(self.reduce_scatters)
        assert found is not None
        self.residuals = found

    def step(self, gradients: list[Tensor]) -> tuple[list[Tensor], int]:
        """Sums of each part, the last one first as a backward pass has it, and the bytes sent."""
        sums, sent = [], 0
        for scatter, gradient in reversed(list(zip(self.reduce_scatters, gradients, strict=True))):
            output = torch.empty(gradient.numel() // self.world)
            sent += scatter(output, gradient, dist.group.WORLD)
            sums.append(output)
        self.residuals.end_step(torch.device("cpu"))
        return sums[::-1], sent


def gradients(rank: int, step: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for number, part in enumerate(PARTS):
        tensors = [torch.randn(shape, generator=generator) * 10.0**-number for shape in part.values()]
        found.append(flat(tensors, world))
    return found


def exactly(given: list[Tensor], rank: int, world: int) -> list[Tensor]:
    """This rank's part of the sums."""
    sums = []
    for tensor in given:
        total = tensor.double()
        dist.all_reduce(total)
        sums.append(total.view(world, -1)[rank])
    return sums


def residuals(state: dict[str, Tensor], codec: dict[str, Any], world: int) -> list[Tensor]:
    """What a rank keeps, as its flat gradients. The compressed parameters of the first part are its first and third."""
    up, norm, down = (of_rank(shape, world) for shape in PARTS[0].values())
    head = of_rank(PARTS[2]["head.weight"], world)
    if codec["mode"] in RotatedIntegers.modes():
        return [torch.zeros(part.numel()) for part in gradients(0, 0, world)]
    if codec["mode"] in Quantized.modes():
        # By part, each owner's numbers filled up to whole blocks.
        first, last = (state[f"residual.{number}"].view(world, -1) for number in (0, 2))
        compressed, last = first[:, : up + down].split([up, down], 1), last[:, :head]
    else:
        compressed, last = [state[f"residual.{index}"].view(world, -1) for index in (0, 1)], state["residual.2"]
    rows = torch.cat([compressed[0], torch.zeros(world, norm), compressed[1]], 1)
    return [rows.flatten(), torch.zeros(world * of_rank((63,), world)), last.flatten()]


def representable(codec: dict[str, Any], rank: int, world: int) -> float:
    """The largest error of a first sum of numbers that are all the same multiple of every code's levels, or that
    negative."""
    levels = math.prod(2 ** (int(mode[3:]) - 1) - 1 for mode in Quantized.modes())
    mine = [tensor.sign() * (levels * 2.0**-20) for tensor in gradients(rank, 0, world)]
    sums, _ = Stage(codec, world).step(mine)
    return largest([float((a - b).abs().max()) for a, b in zip(sums, exactly(mine, rank, world), strict=True)])


def conserved(codec: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What was given against what was applied and what is kept; a stage that takes over half-way, against it."""
    stage = Stage(codec, world)
    given: list[Tensor] = []
    applied: list[Tensor] = []
    sent, told, unequal = [], [], 0.0
    for step in range(STEPS):
        mine = gradients(rank, step, world)
        if step == STEPS // 2:
            later = Stage(codec, world)
            later.residuals.load_state({key: tensor.clone() for key, tensor in stage.residuals.state().items()})
        sums, bytes_ = stage.step(mine)
        if step >= STEPS // 2:
            again, _ = later.step(mine)
            unequal += sum(float(not torch.equal(a, b)) for a, b in zip(sums, again, strict=True))
        given = [a + b for a, b in zip(given or [0] * len(mine), exactly(mine, rank, world), strict=True)]
        applied = [a + b.double() for a, b in zip(applied or [0] * len(sums), sums, strict=True)]
        sent.append(bytes_)
        told.append(residual_metrics([stage.residuals]))
    before = {key: tensor.clone() for key, tensor in stage.residuals.state().items()}
    broken = gradients(rank, STEPS, world)
    if rank == 1:
        broken[0][123] = torch.inf
    infinite, _ = stage.step(broken)
    after = stage.residuals.state()
    left = exactly(residuals(before, codec, world), rank, world)
    errors = [float((a - b - c).norm() / a.norm()) for a, b, c in zip(given, applied, left, strict=True)]
    return {
        "error": largest(errors),
        "unequal": largest([unequal]),
        "sent": sent,
        "density": [row.get("density") for row in told],
        "ratio": told[-1].get("residual_norm_ratio"),
        "infinite": largest([float(infinite[0].isfinite().any())]),
        "others are finite": largest([float(not infinite[2].isfinite().all())]),
        "untouched": largest([
            0.0,
            *(
                float(not torch.equal(before[key], after[key]))
                for key in before
                if key.startswith("residual.") and key != "residual.2"
            ),
        ]),
    }  # fmt: skip
