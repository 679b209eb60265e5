"""Low-rank products, TAGC and local steps on three ranks against what one process computes.

python product_cases.py all 3 FOLDER
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import largest, launch, process_group
from torch import Tensor, nn

from hpctrain.compress.collectives.agreed_index import agreed_index
from hpctrain.compress.collectives.sparse_state import ErrorFeedback
from hpctrain.compress.reducers.outer_optimizer import OuterOptimizer
from hpctrain.compress.reducers.power_sgd import PowerSgdReducer
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.compress.reducers.tagc import TagcReducer
from hpctrain.compress.select.selectors import select
from hpctrain.records.plan.compression import Tagc
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import AUTO_BYTES, PowerSgd

SHAPES = [(48, 96), (48, 96), (96, 48), (17,), (4, 12, 64), (5, 6), (80, 64)]
CHOSEN = [0, 1, 2, 4, 5, 6]
RANK = 4
REMAINDERS = ("int2", "int1")
EVERY_TWO = LocalSteps(mode="local_steps", every=2, outer_lr=0.7, outer_momentum=0.9)
SIDES = [(48, 96), (48, 96), (96, 48), (80, 64)]
"""Of the matrices that rank 4 pays for: the fourth, of four rows, and the fifth, small one are not among them."""


def gradients(seed: int, step: int = 0) -> list[Tensor]:
    """Of this rank: the third a transposed view, the last in bf16."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + dist.get_rank())
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[2] = torch.randn(SHAPES[2][::-1], generator=generator).T
    return made


def exact(tensors: list[Tensor]) -> list[Tensor]:
    sums = [tensor.contiguous().clone() for tensor in tensors]
    for tensor in sums:
        dist.all_reduce(tensor)
    return sums


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference on any rank."""
    return largest([float((one.float() - other.float()).abs().max()) for one, other in zip(ours, theirs, strict=True)])


def between_ranks(tensors: list[Tensor]) -> float:
    """Largest difference between this rank's numbers and those of the first."""
    firsts = [tensor.contiguous().clone() for tensor in tensors]
    for tensor in firsts:
        dist.broadcast(tensor, 0)
    return apart(tensors, firsts)


def low_rank(**changes: Any) -> PowerSgdReducer:
    options = {"rank": RANK, "warmup_steps": 0, **changes}
    return PowerSgdReducer(dist.group.WORLD, CHOSEN, PowerSgd(mode="power_sgd", **options))


def tagc(mode: str = "standard", reset: str = "none", **changes: Any) -> TagcReducer:
    options = {"density": 0.1, "warmup_steps": 0, **changes}
    feedback = ErrorFeedback(mode, reset=reset, reset_every=3)  # type: ignore[arg-type]
    return TagcReducer(dist.group.WORLD, CHOSEN, Tagc(mode="tagc", **options), feedback)


def conserved(reducer: PowerSgdReducer | TagcReducer, steps: int = 5) -> dict[str, float]:
    """What was applied and what the residuals hold, beside all gradients."""
    given = [torch.zeros(shape) for shape in SHAPES]
    applied = [torch.zeros(shape) for shape in SHAPES]
    differing, norm = 0.0, 0.0
    compressed = [0, 1, 2, 6] if isinstance(reducer, PowerSgdReducer) else CHOSEN
    for step in range(steps):
        mine = gradients(1, step)
        norm = math.sqrt(sum(float(mine[index].square().sum()) for index in compressed))
        given = [total + sums for total, sums in zip(given, exact(mine), strict=True)]
        reducer.reduce(mine)
        differing = max(differing, between_ranks(mine))
        applied = [total + now for total, now in zip(applied, mine, strict=True)]
    state = reducer.state()
    kept = math.sqrt(sum(float(state[f"residual.{index}"].square().sum()) for index in compressed))
    ratio = reducer.metrics()["residual_norm_ratio"] * norm / kept
    residuals = [
        state[f"residual.{index}"].reshape(shape).clone() if f"residual.{index}" in state else torch.zeros(shape)
        for index, shape in enumerate(SHAPES)
    ]
    held = exact(residuals)
    whole = [done + left for done, left in zip(applied, held, strict=True)]
    return {
        "error": apart(whole, given),
        "held": min(float(held[index].abs().max()) for index in (0, 1, 2, 6)),
        "differing": differing,
        "told": ratio,
    }


def stated_bytes(remainder: str) -> float:
    """Bytes that a rank sends for each number of a wide matrix, divided by those that `rank: auto` allows."""
    codec = PowerSgd.model_validate({"mode": "power_sgd", "rank": "auto", "remainder": remainder, "warmup_steps": 0})
    matrix, world = torch.ones(768, 768), dist.get_world_size()
    sent = PowerSgdReducer(dist.group.WORLD, [0], codec).reduce([matrix])
    return sent / matrix.numel() / (2 * (world - 1) / world * AUTO_BYTES[codec.remainder])


def not_finite(reducer: Reducer) -> dict[str, Any]:
    """One NaN on one rank, then in a tensor that is not compressed; each leaves the residuals alone."""
    reducer.reduce(gradients(2))
    before = {key: value.clone() for key, value in reducer.state().items() if key.startswith("residual")}
    seen = []
    for index, value in ((1, math.nan), (3, math.inf)):
        mine = gradients(2, 1)
        if dist.get_rank() == 1:
            mine[index].view(-1)[7] = value
        reducer.reduce(mine)
        blind = torch.tensor(float(mine[index].isfinite().all()))
        dist.all_reduce(blind, op=dist.ReduceOp.MAX)
        seen.append(float(blind) == 0)
    after = reducer.state()
    moved = max(float((after[key] - value).abs().max()) for key, value in before.items())
    mine = gradients(2, 3)
    reducer.reduce(mine)
    return {
        "seen": seen,
        "moved": largest([moved]),
        "finite after": all(bool(tensor.isfinite().all()) for tensor in mine),
    }


def resumed(make: Callable[[], Reducer]) -> dict[str, float]:
    """Another reducer goes on from a state, bit by bit; and one rank that lost it joins those that have it."""
    straight = make()
    for step in range(3):
        straight.reduce(gradients(3, step))
    kept = {key: value.clone() for key, value in straight.state().items()}
    second, third = make(), make()
    second.load_state(kept)
    third.load_state(kept if dist.get_rank() != 0 else {})
    expected, again, joined = (gradients(3, 3) for _ in range(3))
    for reducer, tensors in ((straight, expected), (second, again), (third, joined)):
        reducer.reduce(tensors)
    return {"error": apart(again, expected), "joined differing": between_ranks(joined)}


def low_rank_cases() -> dict[str, Any]:
    mine = gradients(4)
    sums = exact(mine)
    # Sums of rank 2 in a common span, one of zeros, and one in bf16.
    generator = torch.Generator().manual_seed(5)
    mine[0] = torch.randn(48, 2, generator=generator) @ gradients(5)[0][:2]
    mine[1].zero_()
    mine[6] = torch.randn(80, 1, generator=generator).matmul(gradients(5)[6][:1]).bfloat16()
    sums = exact(mine)
    sent = low_rank().reduce(mine)
    dense = sum(math.prod(SHAPES[index]) for index in (3, 4, 5))
    # P in one bf16 ring; Q in three parts, which are sent to their owner and back.
    factors = [RANK * sum(side[number] for side in SIDES) for number in (0, 1)]
    expected = 2 * 2 * (4 * dense + 2 * factors[0]) // 3 + 2 * 2 * 2 * math.ceil(factors[1] / 3)
    warming = gradients(6)
    warmed = exact(warming)
    low_rank(warmup_steps=1).reduce(warming)
    steady = low_rank()
    same = gradients(7)
    target = exact(same)
    total = [torch.zeros_like(tensor) for tensor in target]
    for _ in range(25):
        now = [tensor.clone() for tensor in same]
        steady.reduce(now)
        total = [one + other for one, other in zip(total, now, strict=True)]
    means = [tensor / 25 for tensor in total]
    norms = [float((mean - sums).norm() / sums.norm()) for mean, sums in zip(means, target, strict=True)]
    return {
        "low rank": {
            "spanned": apart([mine[0]], [sums[0]]) / float(sums[0].abs().max()),
            "exempt": apart([mine[1], *mine[3:6]], [sums[1], *sums[3:6]]),
            "bf16": apart([mine[6]], [sums[6]]) / float(sums[6].abs().max()),
            "bytes": [sent, expected],
            "warm-up": apart(warming, warmed),
            "mean of steps": largest(norms),
            "state": sorted(steady.state()),
        },
        "low rank, conserved": conserved(low_rank()),
        **{f"low rank, {rest}, conserved": conserved(low_rank(remainder=rest)) for rest in REMAINDERS},
        "low rank, bytes": {rest: stated_bytes(rest) for rest in ("none", *REMAINDERS)},
        "low rank, not finite": not_finite(low_rank(remainder="int2")),
        "low rank, resumed": resumed(lambda: low_rank(warmup_steps=2, remainder="int2")),
    }


def chosen_sums() -> dict[str, Any]:
    """Whole numbers: the sum of what each rank chose must come out bit by bit, read from either message."""
    found: dict[str, Any] = {}
    for name, ratio in (("auto", "auto"), ("sketch", 2.0)):
        mine = [(1000 * tensor).round() for tensor in gradients(8)]
        kept = [torch.zeros(tensor.shape) for tensor in mine]
        for index, tensor in enumerate(mine):
            flat = tensor.reshape(-1)
            places = select(flat, math.ceil(0.1 * flat.numel()), "exact")
            kept[index].view(-1)[places] = flat[places]
        wanted = [sums if index in CHOSEN else whole for index, (sums, whole) in
                  enumerate(zip(exact(kept), exact(mine), strict=True))]  # fmt: skip
        reducer = tagc("none", ratio=ratio)
        sent = reducer.reduce(mine)
        total = sum(math.prod(SHAPES[index]) for index in CHOSEN)
        metrics = reducer.metrics()
        cells = round(metrics["union_density"] * total) if ratio == "auto" else total // 6 * 3
        ring = sum(2 * 2 * 4 * numbers // 3 for numbers in (SHAPES[3][0], 1, len(CHOSEN), cells))
        found[name] = {
            "error": apart(mine, wanted),
            "unread": metrics["unread"],
            "bytes": [sent, ring + 2 * 2 * math.ceil(total / 24)],
        }
    return found


def published_indices() -> dict[str, Any]:
    """The published forms of the index, where ranks share some positions and have some of their own."""
    rank, numel = dist.get_rank(), 999
    positions = torch.tensor(sorted({5, 6, 500 + 7 * rank, 990 + rank}))
    every = sorted({place for member in range(3) for place in (5, 6, 500 + 7 * member, 990 + member)})
    found = {form: agreed_index(form, positions, numel, dist.group.WORLD) for form in ("union", "4bit", "1bit")}
    # Three bits at position 5 are 1 and a carry; with the carry, those at position 6 are 0, and the byte overflows.
    wrong = sorted({*every} - {6})
    exact_places = {form: index.tolist() == every for form, (index, _) in found.items()}
    reducer = tagc(ratio=2.0, density=0.05, index="4bit")
    other = tagc(ratio=2.0, density=0.05)
    mine, same = gradients(12), gradients(12)
    reducer.reduce(mine)
    other.reduce(same)
    spoilt = tagc(ratio=2.0, density=0.3, index="1bit")
    spoilt_case = conserved(spoilt)
    return {
        "exact": exact_places,
        "1bit": found["1bit"][0].tolist() == wrong,
        "bytes": [sent for _, sent in found.values()],
        "4bit, sums": apart(mine, same),
        "1bit, error": spoilt_case["error"],
        "1bit, differing": spoilt_case["differing"],
    }


def tagc_cases() -> dict[str, Any]:
    flushing = tagc(reset="flush")
    for step in range(3):
        flushing.reduce(gradients(9, step))
    overloaded = tagc(ratio=10.0, density=0.2)
    case = conserved(overloaded)
    return {
        "tagc": chosen_sums(),
        "tagc, conserved": conserved(tagc()),
        "published": published_indices(),
        "tagc, overloaded": {**case, "unread": overloaded.metrics()["unread"]},
        "tagc, not finite": not_finite(tagc()),
        "tagc, resumed": resumed(lambda: tagc(warmup_steps=2)),
        "tagc, flushed": largest([float(flushing.state().get("residual.0", torch.zeros(1)).abs().max())]),
    }


def walk(parameter: nn.Parameter, step: int) -> None:
    """What an inner optimizer does."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    parameter.data.add_(torch.randn(parameter.shape, generator=generator))


def local_steps_cases() -> dict[str, Any]:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(start.clone())
    local = OuterOptimizer(dist.group.WORLD, [parameter], EVERY_TWO)
    reference = start.clone()
    momentum = nn.Parameter(reference)
    outer = torch.optim.SGD([momentum], lr=0.7, momentum=0.9, nesterov=True)
    error, sent, refused = 0.0, [], ""
    for step in range(1, 5):
        walk(parameter, step)
        way = momentum.detach() - parameter.detach()
        sent.append(local.after_step(step))
        if step % 2:
            try:
                local.state()
            except RuntimeError as problem:
                refused = str(problem)
            continue
        dist.all_reduce(way)
        momentum.grad = way / dist.get_world_size()
        outer.step()
        error = max(error, apart([parameter.detach()], [momentum.detach()]))
    differing = between_ranks([parameter.detach()])
    state = {key: value.clone() for key, value in local.state().items()}

    def go_on(kept: dict[str, Tensor]) -> tuple[nn.Parameter, OuterOptimizer]:
        weights = nn.Parameter(momentum.detach().clone())
        weights.data.copy_(parameter.data)
        other = OuterOptimizer(dist.group.WORLD, [weights], EVERY_TWO)
        other.load_state(kept)
        walk(weights, 5)
        other.after_step(5)
        other.outer_sync()
        return weights, other

    twin, _ = go_on(state)
    newcomer, _ = go_on(state if dist.get_rank() else {})
    fresh, _ = go_on({})
    walk(parameter, 5)
    local.after_step(5)
    local.outer_sync()
    resumed_error = apart([twin.detach()], [parameter.detach()])
    before = local.state()["velocity.0"].clone()
    if dist.get_rank() == 1:
        parameter.data[0, 0] = math.nan
    local.after_step(6)
    blind = largest([float(parameter.isfinite().any())])
    return {
        "local steps": {
            "error": error,
            "differing": differing,
            "sent": sent,
            "refused": refused,
            "resumed": resumed_error,
            "newcomer": apart([newcomer.detach()], [fresh.detach()]),
            "blind": blind,
            "moved": apart([local.state()["velocity.0"]], [before]),
        }
    }


def outer(codec: dict[str, Any], parameters: list[nn.Parameter]) -> OuterOptimizer:
    settings = LocalSteps.model_validate({"mode": "local_steps", "outer_lr": 1.0, "outer_momentum": 0.0, **codec})
    return OuterOptimizer(dist.group.WORLD, parameters, settings)


def fresh(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(64, 66 + index, generator=generator)) for index in range(count)]


def integer_changes() -> dict[str, Any]:
    """Means of weights by integers of 4 bits: what was applied and what the residuals hold, beside all changes."""
    weights = [*fresh(2), nn.Parameter(torch.zeros(5))]
    starts = [weight.detach().clone() for weight in weights]
    given = [torch.zeros_like(start) for start in starts]
    local = outer({"every": 1, "values": "int4"}, weights)
    sent = 0
    for step in range(1, 5):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            walk(weight, step)
        given = [total + one - other for total, one, other in zip(given, before, weights, strict=True)]
        sent = local.after_step(step)
    world = dist.get_world_size()
    kept = {key: value.clone() for key, value in local.state().items()}
    applied = [world * (start - weight.detach()) for start, weight in zip(starts, weights, strict=True)]
    held = exact([kept[f"residual.{index}"].view_as(start) for index, start in enumerate(starts[:2])])
    whole = [done + left for done, left in zip(applied, [*held, torch.zeros(5)], strict=True)]
    again = [nn.Parameter(weight.detach().clone()) for weight in weights]
    other = outer({"every": 1, "values": "int4"}, again)
    other.load_state(kept)
    for optimizer, parameters in ((local, weights), (other, again)):
        for parameter in parameters:
            walk(parameter, 5)
        optimizer.after_step(5)
    numbers = 64 * (66 + 67)
    part = math.ceil(numbers / (3 * 256)) * 256
    return {
        "error": apart(whole, exact([change.detach() for change in given])),
        "held": min(float(tensor.abs().max()) for tensor in held),
        "differing": between_ranks([weight.detach() for weight in weights]),
        "resumed": apart([weight.detach() for weight in again], [weight.detach() for weight in weights]),
        # Integers to two owners and back; five exact numbers in a ring.
        "bytes": [sent, 2 * 2 * part * (4 + 128) // 256 + 2 * 2 * 4 * 5 // 3],
    }


def streaming() -> dict[str, Any]:
    """Two parts of four parameters, the first at each second step, the other at each fourth."""
    weights = fresh(4)
    local = outer({"every": 4, "parts": 2}, weights)
    spread, sent = [], []
    for step in range(1, 7):
        for weight in weights:
            walk(weight, step)
        sent.append(local.after_step(step))
        spread.append([between_ranks([weight.detach()]) > 0 for weight in weights])
    local.outer_sync()
    return {"spread": spread, "sent": sent, "met": between_ranks([weight.detach() for weight in weights])}


def overlapping() -> dict[str, float]:
    """A sync that begins after step 2 and ends after step 3, on exact sums and on integers of 8 bits."""
    found = {}
    for values in ("fp32", "int8"):
        (weight,) = fresh(1)
        local = outer({"every": 2, "overlap_steps": 1, "values": values}, [weight])
        for step in (1, 2):
            walk(weight, step)
            local.after_step(step)
        then = weight.detach().clone()
        mean = exact([then])[0] / dist.get_world_size()
        walk(weight, 3)
        moved = weight.detach() - then
        local.after_step(3)
        found[values] = apart([weight.detach()], [mean + moved])
    return found


def cases(folder: Path, rank: int, world: int) -> dict[str, Any]:
    with process_group(folder, rank, world):
        found = {**low_rank_cases(), **tagc_cases(), **local_steps_cases()}
        return found | {"integers": integer_changes(), "streaming": streaming(), "overlapping": overlapping()}


if __name__ == "__main__":
    launch(cases, int(sys.argv[2]), sys.argv[3])
