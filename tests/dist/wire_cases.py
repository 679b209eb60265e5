"""Dense sums by themselves, exact and in fewer bytes; called by the cases beside it, on four ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from processes import largest
from torch import Tensor, nn

from hpctrain.bench.compression.methods import METHODS, MethodContext
from hpctrain.bench.compression.planned_codec import ChoiceRequest, StepWorkload
from hpctrain.compress.build import build_block_code, build_reducer
from hpctrain.compress.collectives.level_reduce_scatter import LevelGroups
from hpctrain.compress.reducers.levels import LevelReducer, ReplicatedNodeLevel
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.reduce_scatter_all_gather import Bf16BucketCodec, ReduceScatterAllGather
from hpctrain.compress.reducers.reducer import DenseReducer, Reducer
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.layer_groups import layer_group
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.rotated import RotatedIntegers

STEPS = 5
BUCKET_BYTES = 60_000
"""Buckets of the model below: seven, of one layer or two."""


class _Counting:
    """Counts the buckets that are written."""

    written = 0

    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        self.written += 1
        super().encode(bucket, tensors, outgoing)  # type: ignore[misc]


class _CountingBf16(_Counting, Bf16BucketCodec): ...


class _CountingIntegers(_Counting, QuantizedBucketCodec): ...


def wire_of(mode: str) -> Any:
    codec = make_codec({"mode": mode})
    if isinstance(codec, Quantized | RotatedIntegers):
        return _CountingIntegers(build_block_code(codec), codec.has_state)
    return _CountingBf16()


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    sides = (48, 90, 131, 64, 200, 33, 48)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sides)])


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(100 * step + rank))


class Trainee:
    """A model whose gradients are summed, beside its backward pass or behind it."""

    def __init__(self, mode: str, beside: bool, groups: LevelGroups | None = None) -> None:
        self.model = small_model()
        self.parameters = list(self.model.parameters())
        self.chosen = [index for index, parameter in enumerate(self.parameters) if parameter.dim() > 1]
        self.wire = wire_of(mode)
        self.reducer: Reducer = self._over(dist.group.WORLD)
        if groups is not None:
            within = ReplicatedNodeLevel(groups.within, [p.shape for p in self.parameters], None, BUCKET_BYTES)
            self.reducer = LevelReducer(within, self._over(groups.between))
        if beside:
            self.reducer.overlap(self.parameters)

    def _over(self, group: dist.ProcessGroup) -> ReduceScatterAllGather:
        return ReduceScatterAllGather(group, dict.fromkeys(self.chosen, self.wire), BUCKET_BYTES)

    def step(self, rank: int, step: int, bad: bool = False) -> tuple[list[Tensor], list[Tensor], int]:
        """Gradients of this rank, their sums, and buckets that left before the backward pass was over."""
        x = rows_of(rank, step)
        self.model.zero_grad(set_to_none=True)
        # What leaves beside the backward pass is no longer this rank's own gradient when that is over.
        alone = torch.autograd.grad(self.model(x).square().sum(), self.parameters)
        if bad:
            alone = tuple(grad * torch.inf if index == 0 else grad for index, grad in enumerate(alone))
        before = self.wire.written
        self.model(x).square().sum().backward()
        early = self.wire.written - before
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if bad:
            gradients[0].copy_(alone[0])
        self.reducer.reduce(gradients)
        return list(alone), [grad.clone() for grad in gradients], early


def summed_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    sums = [tensor.double() for tensor in tensors]
    for tensor in sums:
        dist.all_reduce(tensor)
    return sums


def pairs_of_ranks(rank: int, world: int) -> LevelGroups:
    """The groups of this rank, if each node has two ranks."""
    within = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    between = [dist.new_group(list(range(place, world, 2))) for place in range(2)]
    return LevelGroups(within[rank // 2], between[rank % 2])


def part_of(tensor: Tensor, rank: int, groups: LevelGroups | None) -> Tensor:
    """What a rank keeps residuals of: a gradient, or the half of its rows that a rank of a node sums."""
    rows = -(-len(tensor) // 2)
    return tensor if groups is None else tensor[rank % 2 * rows :][:rows]


def dense_wire(mode: str, rank: int, groups: LevelGroups | None = None) -> dict[str, Any]:
    """What was given against what was applied and is kept; beside the backward pass against behind it; a reducer that
    takes over half-way; a gradient that is not finite on one rank. With groups, the ranks of a node sum first."""
    behind, beside = Trainee(mode, beside=False, groups=groups), Trainee(mode, beside=True, groups=groups)
    # By level, buckets between nodes are other ones beside the backward pass, and so are the bits of their sums.
    by_level = groups is not None
    later = Trainee(mode, beside=by_level, groups=groups)
    given = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in behind.parameters]
    applied = [tensor.clone() for tensor in given]
    unequal, early = 0.0, []
    for step in range(STEPS):
        if step == STEPS // 2:
            whose = beside if by_level else behind
            later.reducer.load_state({key: tensor.clone() for key, tensor in whose.reducer.state().items()})
        alone, sums, _ = behind.step(rank, step)
        _, other, left_early = beside.step(rank, step)
        early.append(left_early)
        pairs = [] if by_level else list(zip(sums, other, strict=True))
        if step >= STEPS // 2:
            _, resumed, _ = later.step(rank, step)
            pairs += zip(other, resumed, strict=True)
        unequal += sum(float(not torch.equal(a, b)) for a, b in pairs)
        given = [a + b for a, b in zip(given, alone, strict=True)]
        applied = [a + b for a, b in zip(applied, sums, strict=True)]
    kept = [torch.zeros_like(tensor) for tensor in given]
    state = {key: tensor.clone() for key, tensor in behind.reducer.state().items()}
    for key, tensor in state.items():
        index = int(key.removeprefix("residual."))
        part = part_of(kept[index], rank, groups)
        part.copy_(tensor[: part.numel()].view_as(part))
    given, kept = summed_over_ranks(given), summed_over_ranks(kept)
    errors = [float((a - b - c).norm() / a.norm()) for a, b, c in zip(given, applied, kept, strict=True)]
    first, ratio = f"residual.{behind.chosen[0]}", behind.reducer.metrics().get("residual_norm_ratio")
    _, broken, _ = behind.step(rank, STEPS, bad=rank == 1)
    after = behind.reducer.state()
    return {
        "errors": largest([max(errors)]),
        "unequal": largest([unequal]),
        "early": early,
        "kept": len(state),
        "ratio": ratio,
        "broken are finite": largest([float(broken[0].isfinite().any())]),
        "others are not": largest([float(not all(tensor.isfinite().all() for tensor in broken[4:]))]),
        "touched": largest([float(first in state and not torch.equal(state[first], after[first]))]),
    }


MIXED = {"embedding_head": "bf16", "attention": "rotated_int2", "feed_forward": "int4"}
"""Layer group -> mode of its codec."""


def mixed_wire(rank: int) -> dict[str, Any]:
    """Sums with a codec for each layer group, beside the backward pass, against those of a reducer for each group by
    itself behind it; and a reducer that takes over half-way."""
    spec = DecoderSpec(layers=2, dim=64, heads=4, vocab=320)
    models = [build_stage(spec, 0, spec.layers, seed=0) for _ in range(2)]
    names, parameters = zip(*models[0].named_parameters(), strict=True)
    shapes = [parameter.shape for parameter in parameters]
    parts = [{"mode": mode, "layers": group} for group, mode in MIXED.items()]

    def reducer(codec: dict[str, Any]) -> Reducer:
        return build_reducer(dist.group.WORLD, names, shapes, CodecSpec.model_validate({"codec": codec}))

    beside, later = (reducer({"mode": "mixed", "groups": parts}) for _ in range(2))
    beside.overlap(list(parameters))
    alone = [reducer(part) for part in parts]
    unequal, sent_bytes = 0, []
    for step in range(STEPS):
        if step == STEPS // 2:
            later.load_state({key: tensor.clone() for key, tensor in beside.state().items()})
        tokens = torch.randint(320, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
        gradients: list[list[Tensor]] = []
        for model in models:
            model.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        own = [[gradient.clone() for gradient in gradients[1]] for _ in range(len(alone) + 1)]
        sent_bytes.append((beside.reduce(gradients[0]), [one.reduce(own[n]) for n, one in enumerate(alone)]))
        # Each reducer sums all gradients; those of other groups exactly, whose last bits depend on their buckets.
        for index, (name, gradient) in enumerate(zip(names, gradients[0], strict=True)):
            expected = own[list(MIXED).index(layer_group(name))][index]
            unequal += not (torch.equal if gradient.dim() > 1 else torch.allclose)(gradient, expected)
        if step >= STEPS // 2:
            later.reduce(own[-1])
            unequal += sum(not torch.equal(a, b) for a, b in zip(gradients[0], own[-1], strict=True))
    beside_state, states = beside.state(), [one.state() for one in alone]
    return {
        "unequal": largest([float(unequal)]),
        "state": largest([
            float(not torch.equal(tensor, next(state[key] for state in states if key in state)))
            for key, tensor in beside_state.items()
        ]),
        "kept": sorted(names[int(key.removeprefix("residual."))] for key in beside_state),
        "kept alone": sorted(names[int(key.removeprefix("residual."))] for state in states for key in state),
        "bytes": sent_bytes[-1],
        "ratio": beside.metrics().get("residual_norm_ratio"),
    }  # fmt: skip


def exact_sums(rank: int) -> dict[str, Any]:
    """Exact sums beside the backward pass against those behind it. The gradient of every other step is added to that of
    the one before."""
    behind, beside = small_model(), small_model()
    reducers = [DenseReducer(dist.group.WORLD, BUCKET_BYTES) for _ in range(2)]
    reducers[1].overlap(list(beside.parameters()))
    unequal, memories = 0, []
    for step in range(STEPS):
        sums = []
        for model, reducer in zip((behind, beside), reducers, strict=True):
            if step % 2 == 0:
                model.zero_grad(set_to_none=True)
            model(rows_of(rank, step)).square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            reducer.reduce(gradients)
            sums.append(gradients)
        unequal += sum(not torch.equal(a, b) for a, b in zip(*sums, strict=True))
        memories.append({gradient.untyped_storage().data_ptr() for gradient in sums[1]})
    return {
        "unequal": largest([float(unequal)]),
        "memories": [len(each) for each in memories],
        "new memory": [len(each - memories[0]) for each in memories],
    }


AUTO_WORK = StepWorkload(DecoderSpec(layers=1, dim=64, heads=2, vocab=320), rows=1, seq_len=16)


def planned_by_level(rank: int) -> dict[str, Any]:
    """The bench's method auto on two nodes of two ranks with 100 kB/s between them, beside the method of the same name
    as the plan."""
    group = dist.new_group()
    context = MethodContext(group, 0, AUTO_WORK, devices=2, choice=ChoiceRequest((1e-3, 1e-5)))

    def summed(method: str) -> tuple[int | None, list[Tensor], Plan | None]:
        sync = METHODS[method](build_stage(AUTO_WORK.spec, 0, 1, 1), context)
        torch.manual_seed(rank)
        sync.model(torch.randint(256, (1, 16))).square().mean().backward()
        sent_bytes = sync.reduce()
        return sent_bytes, [weight.grad for weight in sync.model.parameters() if weight.grad is not None], sync.planned

    (sent_bytes, sums, plan), (named_bytes, named_sums, _) = summed("auto"), summed("int4_in_nodes")
    assert plan is not None
    return {
        "levels": [(entry.level, entry.codec.mode) for entry in plan.compression],
        "bytes": (sent_bytes, named_bytes),
        "same sums": all(map(torch.equal, sums, named_sums)),
    }
