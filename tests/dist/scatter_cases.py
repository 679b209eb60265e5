"""The sparse reduce-scatter of sharded states by itself; called by the cases beside it, on four ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from processes import largest
from torch import Tensor

from hpctrain.compress.build import build_scatters
from hpctrain.compress.sparse_scatter import Piece, steps_of
from hpctrain.records.codec import CodecSpec

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
            [Piece(name, torch.Size(shape), of_rank(shape, world)) for name, shape in part.items()] for part in PARTS
        ]
        spec = CodecSpec.model_validate({"codec": codec})
        self.scatters = build_scatters(spec, pieces, dist.group.WORLD, "cpu")
        self.world = world
        found = steps_of(self.scatters)
        assert found is not None
        self.steps = found

    def step(self, gradients: list[Tensor]) -> tuple[list[Tensor], int]:
        """Sums of each part, the last one first as a backward pass has it, and the bytes sent."""
        sums, sent = [], 0
        for scatter, gradient in reversed(list(zip(self.scatters, gradients, strict=True))):
            output = torch.empty(gradient.numel() // self.world)
            sent += scatter(output, gradient, dist.group.WORLD)
            sums.append(output)
        self.steps.end_step(torch.device("cpu"))
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


def conserved(codec: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What was given against what was applied and what is kept; a stage that takes over half-way, against it."""
    stage = Stage(codec, world)
    given: list[Tensor] = []
    applied: list[Tensor] = []
    sent, density, unequal = [], [], 0.0
    for step in range(STEPS):
        mine = gradients(rank, step, world)
        if step == STEPS // 2:
            later = Stage(codec, world)
            later.steps.load_state({key: tensor.clone() for key, tensor in stage.steps.state().items()})
        sums, bytes_ = stage.step(mine)
        if step >= STEPS // 2:
            again, _ = later.step(mine)
            unequal += sum(float(not torch.equal(a, b)) for a, b in zip(sums, again, strict=True))
        given = [a + b for a, b in zip(given or [0] * len(mine), exactly(mine, rank, world), strict=True)]
        applied = [a + b.double() for a, b in zip(applied or [0] * len(sums), sums, strict=True)]
        sent.append(bytes_)
        density.append(stage.steps.figures()[0] / stage.steps.figures()[1])
    before = {key: tensor.clone() for key, tensor in stage.steps.state().items()}
    broken = gradients(rank, STEPS, world)
    if rank == 1:
        broken[0][123] = torch.inf
    infinite, _ = stage.step(broken)
    after = stage.steps.state()
    # The compressed parameters of the first part are its first and its third.
    up, norm, down = (of_rank(shape, world) for shape in PARTS[0].values())
    rows = torch.zeros(world, up + norm + down)
    rows[:, :up] = before["residual.0"].view(world, -1)
    rows[:, up + norm :] = before["residual.1"].view(world, -1)
    kept = [rows.flatten(), torch.zeros(given[1].numel() * world), before["residual.2"]]
    left = exactly(kept, rank, world)
    errors = [float((a - b - c).norm() / a.norm()) for a, b, c in zip(given, applied, left, strict=True)]
    return {
        "error": largest(errors),
        "unequal": largest([unequal]),
        "sent": sent,
        "density": density,
        "infinite": largest([float(infinite[0].isfinite().any())]),
        "others are finite": largest([float(not infinite[2].isfinite().all())]),
        "untouched": largest([
            float(not torch.equal(before[key], after[key])) for key in ("step", "residual.0", "residual.1")
        ]),
    }  # fmt: skip
