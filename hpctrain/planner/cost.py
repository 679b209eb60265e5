"""How long the parts of a step take: a roofline of measured FLOP/s, memory bandwidth and cost per operation.

A part of a stage takes  flops / speed + bytes touched / bandwidth + operations · launch.  The three speeds are those
the probe measured on the very device; the counts per block below were fitted to this model's forward and backward
passes on one CPU core (dim 128 to 768, 32 to 1024 tokens; 157 GFLOP/s, 17.6 GB/s, 0.83 us an operation): it is within
15 % at 128 tokens or more and within 30 % below. They count passes, not seconds, so they carry over to other devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.planner.memory import BUCKET_BYTES, MemoryModel
from hpctrain.planner.network import Links, message_s, number_sum_s, ring_sum_s, rings_leaving
from hpctrain.planner.unit import Unit
from hpctrain.planner.workload import Share, Workload

EFFICIENCY = 1.0
"""Share of the measured FLOP/s that the products of a block reach; what is lost beside them is counted as bytes."""
BLOCK_OPS = (425.0, 675.0)
"""Cost of a block's forward and backward calls, in tiny operations (each module call costs several of them)."""
TENSOR_PARALLEL_OPS = (2300.0, 3700.0)
"""Added dispatch of a block's sharded tensors, in tiny operations: measured with DTensor on one rank, where nothing is
sent; it is the host's work, so a small block pays it on any device."""
ACTIVATION_PASSES = (6.0, 12.0)
"""Times that what a block keeps is read or written beside its products, forward and backward."""
WEIGHT_PASSES = (1.5, 6.0)
"""Times that a micro-batch reads or writes the weights: forward; backward with the sum into the gradient."""
LOGITS_PASSES = (1.5, 3.0)
"""Times that the logits and what the loss keeps are read or written."""
EMBEDDING_PASSES = (0.0, 4.0)
"""A row a token is nothing; the backward pass makes a whole gradient of the embedding and adds it up."""
EMBEDDING_OPS = (12.0, 25.0)
HEAD_OPS = (100.0, 150.0)
"""Cost of the last norm, the head and the loss, in tiny operations."""
ACTION_OPS = 250.0
"""Added by the schedule's executor to each forward or backward of a stage, in tiny operations."""
OPS_OF_KIND = {"cpu": 1.0, "cuda": 0.15}
"""The counts above are in tiny CPU operations (0.83 us where they were measured). On CUDA the same work of the host is
fewer operations, because one is a kernel launch: about 60 kernels in a block's forward; an assumption, not measured."""
OPTIMIZER_BYTES = 110.0
"""Bytes touched per parameter by AdamW without fused kernels (55), by the norm in double precision (50) and by clipping
(5), measured."""
OPTIMIZER_OPS = 60.0
"""Tiny operations per tensor in that update."""
SHARDED_OPTIMIZER_OPS = 170.0
"""The same for a tensor that is sharded over replicas."""
SHARD_OPS = (500.0, 700.0)
"""Added to a block's forward and backward by `fully_shard`, in tiny operations; measured on one rank, where nothing is
sent (0.41 and 0.5 to 0.6 ms at 0.83 us)."""
RECOMPUTE_OPS = (340.0, 670.0)
"""Added to a block's forward and backward by torch's checkpointing itself, in tiny operations, measured."""
SPLIT_OPS = 1000.0
"""Added to a block's backward by cutting it into inputs and weights, in tiny operations, measured."""
SPLIT_PASSES = 3.0
"""What a block keeps is read or written that many times more then: 9 % of the backward at dim 512, 27 % at 256."""
INPUTS_SHARE = 0.55
"""Share of the cut backward that its inputs take; measured, the same at both sizes."""
TENSORS_PER_BLOCK = 9
REDUCER_BYTES = 16.0
"""Bytes touched per parameter by gathering gradients into flat buckets and copying the sums back."""

Pair = tuple[float, float]


@dataclass(frozen=True)
class Parts:
    """Seconds (forward, backward) of the parts of a stage for one micro-batch."""

    block: Pair
    block_tp: Pair
    """All-reduces and dispatch of a block that is shared by several devices."""
    embedding: Pair
    head: Pair
    block_split: float
    """Added to a block's backward where it is cut into inputs and weights."""

    def whole_model(self, layers: int) -> float:
        """Forward and backward of everything."""
        return layers * (sum(self.block) + sum(self.block_tp)) + sum(self.embedding) + sum(self.head)


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage for one micro-batch; the tensor-parallel part is included in forward and backward."""

    forward: float
    backward: float
    tensor_parallel: float
    inputs: float
    """The backward for inputs alone; nothing on the first stage, where nobody waits for them."""
    weights: float
    """The backward for weights alone."""

    @property
    def both(self) -> float:
        return self.forward + self.backward


class CostModel:
    """Answers with seconds (and, by `memory`, with bytes); remembers what it computed."""

    def __init__(self, work: Workload, links: Links) -> None:
        self.work = work
        self.links = links
        self.memory = MemoryModel(work)
        self._parts: dict[tuple[Unit, int], Parts] = {}
        self._stages: dict[tuple[Unit, int, Share], StageTime] = {}
        self._sends: dict[tuple[Unit, Unit, int], float] = {}
        self._updates: dict[tuple[Unit, Share, int], float] = {}

    def parts(self, unit: Unit, micro_batch: int) -> Parts:
        """Times on a unit for micro-batches of that many rows."""
        key = (unit, micro_batch)
        if key not in self._parts:
            self._parts[key] = self._compute_parts(unit, micro_batch)
        return self._parts[key]

    def stage(self, unit: Unit, micro_batch: int, share: Share) -> StageTime:
        """A stage that holds this share of the model."""
        key = (unit, micro_batch, share)
        if key not in self._stages:
            self._stages[key] = _stage(self.parts(unit, micro_batch), share, ACTION_OPS * _op_s(unit))
        return self._stages[key]

    def send(self, source: Unit, target: Unit, micro_batch: int) -> float:
        """A boundary activation, or its gradient, from one unit to another."""
        if source is target:
            return 0.0
        key = (source, target, micro_batch)
        if key not in self._sends:
            size = self.work.hidden_bytes(micro_batch, len(source.workers))
            self._sends[key] = message_s(self.links, source.places, target.places, size)
        return self._sends[key]

    def optimizer(self, unit: Unit, share: Share, shards: int = 1) -> float:
        """Update of a stage's parameters, or of this replica's part of them."""
        key = (unit, share, shards)
        if key not in self._updates:
            parameters = self.work.parameters(share, len(unit.workers)) / shards
            tensors = share.blocks * TENSORS_PER_BLOCK + share.first + 2 * share.last
            touched_s = parameters * OPTIMIZER_BYTES / unit.bytes_per_s
            ops = OPTIMIZER_OPS if shards == 1 else SHARDED_OPTIMIZER_OPS
            self._updates[key] = touched_s + tensors * ops * _op_s(unit)
        return self._updates[key]

    def gradient_sums(self, rings: Sequence[Sequence[Unit]], shares: Sequence[Share]) -> list[float]:
        """Ring all-reduce of each stage's fp32 gradients over its replicas.

        All stages reduce at about the same time, so rings that leave a node together divide its bandwidth.

        Args:
            rings: [stage] -> the units of its replicas.
            shares: what each stage holds.
        """
        if len(rings[0]) == 1:
            return [0.0] * len(rings)
        shards = [list(zip(*(unit.places for unit in ring), strict=True)) for ring in rings]
        sharing = rings_leaving([places for of_stage in shards for places in of_stage])
        sums = []
        for ring, share, of_stage in zip(rings, shares, shards, strict=True):
            parameters = self.work.parameters(share, len(of_stage))
            buckets = max(1, math.ceil(4.0 * parameters / BUCKET_BYTES))
            sent = max(ring_sum_s(self.links, places, 4.0 * parameters / buckets, sharing) for places in of_stage)
            sums.append(buckets * sent + REDUCER_BYTES * parameters / min(unit.bytes_per_s for unit in ring))
        return sums

    def tied_sum(self, first: Unit, last: Unit) -> float:
        """Sum of the two gradients of an embedding that is the head too, where they lie on different devices."""
        if not self.work.spec.tied or first is last:
            return 0.0
        size = 4.0 * self.work.spec.end_parameters(len(first.workers), first=True, last=False)
        return max(ring_sum_s(self.links, pair, size) for pair in zip(first.places, last.places, strict=True))

    def norm_sum(self, units: Sequence[Unit]) -> float:
        """The sum over all devices that clipping the gradient's norm needs."""
        return number_sum_s(self.links, [place for unit in units for place in unit.places])

    def _compute_parts(self, unit: Unit, micro_batch: int) -> Parts:
        spec, seq_len, tp = self.work.spec, self.work.seq_len, len(unit.workers)
        head_tp = self.work.head_shards(tp)
        head_flops = spec.forward_flops(micro_batch, seq_len, spec.layers)
        block_flops = (spec.forward_flops(micro_batch, seq_len) - head_flops) / spec.layers
        block_bytes = self.work.block_bytes(micro_batch, tp)
        logits = spec.logits_bytes(micro_batch, seq_len, head_tp)
        embedding_bytes = 4.0 * spec.embedding_parameters() / head_tp

        def seconds(way: int, flops: float, touched: float, ops: float) -> float:
            return (1 + way) * flops / (unit.flops * EFFICIENCY) + touched / unit.bytes_per_s + ops * _op_s(unit)

        def both(flops: float, kept: float, passes: Pair, weights: float, ops: Pair, weight_passes: Pair) -> Pair:
            forward, backward = (
                seconds(way, flops, kept * passes[way] + weights * weight_passes[way], ops[way]) for way in (0, 1)
            )
            return forward, backward

        weights = 4.0 * spec.block_parameters() / tp
        block = both(block_flops / tp, block_bytes, ACTIVATION_PASSES, weights, BLOCK_OPS, WEIGHT_PASSES)
        again = seconds(0, block_flops / tp, block_bytes * ACTIVATION_PASSES[0] + weights * WEIGHT_PASSES[0], 0.0)
        return Parts(
            block=self._with_savings(unit, block, again, products_s=block_flops / tp / (unit.flops * EFFICIENCY)),
            block_tp=self._tensor_parallel(unit, micro_batch),
            embedding=both(0.0, 0.0, (0.0, 0.0), embedding_bytes, EMBEDDING_OPS, EMBEDDING_PASSES),
            head=both(head_flops / head_tp, logits, LOGITS_PASSES, embedding_bytes, HEAD_OPS, WEIGHT_PASSES),
            block_split=SPLIT_PASSES * block_bytes / unit.bytes_per_s + SPLIT_OPS * _op_s(unit),
        )

    def _with_savings(self, unit: Unit, block: Pair, again: float, products_s: float) -> Pair:
        """A block's times with what recomputation and sharding add to them.

        Args:
            again: its forward pass without the cost of calls.
            products_s: the matrix products in it, which selective recomputation does not repeat.
        """
        forward, backward = block
        saving, op_s = self.work.saving, _op_s(unit)
        if saving.zero:
            forward, backward = forward + SHARD_OPS[0] * op_s, backward + SHARD_OPS[1] * op_s
        if saving.recompute != "none":
            calls_s = BLOCK_OPS[0] * op_s
            forward += RECOMPUTE_OPS[0] * op_s
            backward += RECOMPUTE_OPS[1] * op_s + calls_s + again
            backward -= products_s if saving.recompute == "selective" else 0.0
        return forward, backward

    def _tensor_parallel(self, unit: Unit, micro_batch: int) -> Pair:
        """Two all-reduces of the residual stream each way and block (Shoeybi et al. 2019), and the dispatch.

        With sequence parallelism each of them is a reduce-scatter and an all-gather, which send as much. What is
        computed again sends again.
        """
        if len(unit.workers) == 1:
            return (0.0, 0.0)
        size = float(self.work.boundary_bytes(micro_batch))
        reduce = 2 * ring_sum_s(self.links, unit.places, size)
        forward, backward = (reduce + ops * _op_s(unit) for ops in TENSOR_PARALLEL_OPS)
        return forward, backward + (forward if self.work.saving.recompute != "none" else 0.0)


def _stage(parts: Parts, share: Share, action_s: float) -> StageTime:
    times = [action_s + share.blocks * (parts.block[way] + parts.block_tp[way]) for way in (0, 1)]
    for present, part in ((share.first, parts.embedding), (share.last, parts.head)):
        if present:
            times = [times[way] + part[way] for way in (0, 1)]
    forward, backward = times
    inputs, weights = 0.0, backward
    if not share.first:
        split = backward + action_s + share.blocks * parts.block_split
        inputs, weights = INPUTS_SHARE * split, (1 - INPUTS_SHARE) * split
    return StageTime(forward, backward, share.blocks * sum(parts.block_tp), inputs, weights)


def _op_s(unit: Unit) -> float:
    """Seconds of one of the operations that the counts above are in."""
    return unit.launch_s * OPS_OF_KIND[unit.kind]
