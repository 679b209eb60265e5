"""Sparse sums on four ranks, and on two of them; called by the tests beside it: python sparse_cases.py sums 4 FOLDER"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import launch, process_group
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import ValueCode
from hpctrain.compress.collectives.sparse_state import ErrorFeedback, SparseSettings, SparseState
from hpctrain.compress.reducers.sparse import SparseReducer
from hpctrain.compress.select.sparse_counts import AdaptiveSendCounts, Moments, SendCounts
from hpctrain.records.plan.compression import Adaptive, Feedback, Reset, Selector

SHAPES = [(96, 200), (7,), (5000,), (130, 64), (1, 4096)]
COMPRESSED = [0, 2, 3, 4]
STEPS = 5


def gradients(rank: int, step: int) -> list[Tensor]:
    """Of every layer another size, and of one layer another from step to step; the first rank has zeros in one step
    and in one layer, so that the ranks' choices differ in size; one tensor is not contiguous."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tensors = [torch.randn(shape, generator=generator) * 1e-5 * 10**i for i, shape in enumerate(SHAPES)]
    tensors[3] = torch.randn(64, 130, generator=generator).t()
    if rank == 0:
        tensors[2].zero_()
        if step == 3:
            for tensor in tensors:
                tensor.zero_()
    return tensors


def reducer(
    group: dist.ProcessGroup,
    density: float = 1 / 16,
    values: ValueCode = ValueCode.BF16,
    mode: Feedback = "standard",
    reset: Reset = "none",
    selector: Selector = "sampled",
    warmup: int = 0,
    counts: SendCounts | None = None,
    residual: torch.dtype = torch.float32,
) -> SparseReducer:
    feedback = ErrorFeedback(mode, reset=reset, reset_every=STEPS, dtype=residual)
    counts = counts or SendCounts(group, density, warmup)
    state = SparseState(COMPRESSED, [math.prod(SHAPES[index]) for index in COMPRESSED], counts, feedback)
    return SparseReducer(group, state, SparseSettings(selector, values))


def all_reduced_at(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.detach().contiguous().double()
    dist.all_reduce(total, group=group)
    return total


def same_everywhere(tensors: list[Tensor], group: dist.ProcessGroup) -> bool:
    flat = torch.cat([tensor.flatten() for tensor in tensors]).nan_to_num(7.0, 8.0, 9.0)
    everyone = flat.new_empty(dist.get_world_size(group) * flat.numel())
    dist.all_gather_into_tensor(everyone, flat, group=group)
    return all(torch.equal(part, flat) for part in everyone.split(flat.numel()))


def conservation(group: dist.ProcessGroup, rank: int, **settings: Any) -> dict[str, Any]:
    """What all gradients sum up to, against what was applied and what is kept, the worst of all tensors."""
    sparse = reducer(group, **settings)
    given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    applied = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    same, sent, share = True, 0, []
    for step in range(1, STEPS + 1):
        tensors = gradients(rank, step)
        for total, tensor in zip(given, tensors, strict=True):
            total += all_reduced_at(tensor, group)
        sent = sparse.reduce(tensors)
        share.append(sparse.metrics()["density"])
        same = same and same_everywhere(tensors, group)
        for total, tensor in zip(applied, tensors, strict=True):
            total += tensor
    kept = sparse.state()
    errors = []
    for position, (total, done) in enumerate(zip(given, applied, strict=True)):
        left = kept.get(f"residual.{position}", torch.zeros(total.numel()))
        difference = total - done - all_reduced_at(left, group).view_as(total)
        errors.append(float(difference.norm() / total.norm()))
    numbers = sum(given[position].numel() for position in COMPRESSED)
    compressed = sent - 2 * (len(SHAPES) + 7) * 4
    return {
        "error": max(errors),
        "same": same,
        "density": share,
        "bytes_per_number": compressed / numbers,
        "kept": len([key for key in kept if key.startswith("residual.")]),
        "ratio": sparse.metrics().get("residual_norm_ratio"),
    }


def exact(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Whole numbers, all of them, in full precision."""
    sparse = reducer(group, density=1.0, values=ValueCode.FP32)
    tensors = [(tensor * 1e6).round() for tensor in gradients(rank, 1)]
    expected = [all_reduced_at(tensor, group).float() for tensor in tensors]
    sparse.reduce(tensors)
    return {"equal": all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))}


def not_a_number(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    sparse = reducer(group)
    sparse.reduce(gradients(rank, 1))
    before = {key: tensor.clone() for key, tensor in sparse.state().items()}
    tensors = gradients(rank, 2)
    if rank == 1:
        tensors[3][5, 6] = torch.nan
        tensors[0][0, 0] = torch.inf
    sparse.reduce(tensors)
    after = sparse.state()
    return {
        "nan": [int((~tensor.isfinite()).sum()) for tensor in tensors],
        "untouched": before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before),
        "metrics": sparse.metrics(),
        "same": same_everywhere(tensors, group),
    }


def adaptive(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    def counted() -> AdaptiveSendCounts:
        return AdaptiveSendCounts(group, len(COMPRESSED), Adaptive(mode="adaptive", warmup_steps=3, reprofile_every=5))

    def run(sparse: SparseReducer, steps: range) -> Iterator[tuple[float, list[Tensor]]]:
        for step in steps:
            tensors = gradients(rank, step)
            sparse.reduce(tensors)
            yield sparse.metrics()["density"], tensors

    counts = counted()
    whole = reducer(group, counts=counts)
    densities, states, last = [], {}, list[Tensor]()
    for step, (density, tensors) in enumerate(run(whole, range(1, 13)), 1):
        densities.append(density)
        last = tensors
        if step == 7:
            states = {key: tensor.clone() for key, tensor in whole.state().items()}
    # In step 7 the second profile is under way.
    resumed = reducer(group, counts=counted())
    resumed.load_state(states)
    *_, (_, again) = run(resumed, range(8, 13))
    # One rank has lost what the others have.
    torn_counts = counted()
    torn = reducer(group, counts=torn_counts)
    torn.load_state({} if rank == 2 else states)
    torn_densities = [density for density, _ in run(torn, range(8, 13))]
    return {
        "densities": densities,
        "sparsity": counts.sparsity,
        "same": same_everywhere([torch.tensor(counts.sparsity)], group),
        "resumed": all(torch.equal(a, b) for a, b in zip(last, again, strict=True)),
        "torn": torn_densities,
    }


def variances(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Streamed, against equation (2) with all gradients in memory: the largest relative difference. A mean that is
    large beside the distances from it would show what is lost by subtracting sums of squares."""
    moments = Moments(len(COMPRESSED))
    seen = []
    for step in range(1, 7):
        flat = [tensor.reshape(-1) + 0.5 for tensor in gradients(rank, step)]
        seen.append([flat[position] for position in COMPRESSED])
        moments.observe(seen[-1])
    found = moments.variances(group, torch.device("cpu"))
    worst = 0.0
    for layer, streamed in enumerate(found):
        history = torch.stack([step[layer] for step in seen]).double()
        own = (history - history.mean(0)).square().sum() / len(seen)
        direct = float(all_reduced_at(own, group)) / dist.get_world_size(group)
        worst = max(worst, abs(streamed / direct - 1))
    return {"error": worst, "same": same_everywhere([torch.tensor(found)], group)}


def sums(folder: Path, rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group(folder, rank, world):
        four, two = dist.group.WORLD, dist.new_group([0, 1])
        assert four is not None
        for values in ("BF16", "SIGN"):
            found[f"four {values}"] = conservation(four, rank, values=ValueCode[values])
        found["random"] = conservation(four, rank, selector="random")
        found["block, flush"] = conservation(four, rank, selector="block", reset="flush", warmup=2)
        found["zero"] = conservation(four, rank, reset="zero")
        found["none"] = conservation(four, rank, mode="none")
        found["bf16 residual"] = conservation(four, rank, residual=torch.bfloat16)
        found["exact"] = exact(four, rank)
        found["not a number"] = not_a_number(four, rank)
        found["adaptive"] = adaptive(four, rank)
        found["variances"] = variances(four, rank)
        if rank < 2:
            found["two BF16"] = conservation(two, rank)
            found["two exact"] = exact(two, rank)
            found["two not a number"] = not_a_number(two, rank)
    return found


if __name__ == "__main__":
    launch({"sums": sums}[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
