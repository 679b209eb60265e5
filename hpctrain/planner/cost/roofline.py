"""Seconds of a stage's parts for one micro-batch: a roofline with measured speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.constants import DEFAULT_CODEC_S, CostConstants, ForwardBackward
from hpctrain.planner.devices.links import Links, ring_all_reduce_s
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup
from hpctrain.records.topology.topology import CodecSeconds


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of the parts of a stage for one micro-batch: one block (without tensor parallelism), the embedding and
    the head, each as (forward, backward).
    """

    block: ForwardBackward
    block_tp: ForwardBackward
    """Seconds that tensor parallelism adds to a block: all-reduces and dispatch."""
    embedding: ForwardBackward
    head: ForwardBackward
    block_split: float
    """Seconds that splitting a block's backward into I and W adds."""

    def stage_s(self, blocks: int, *, first: bool, last: bool) -> float:
        """Return the seconds of forward and backward of a stage on one tensor-parallel group, for one micro-batch.

        Args:
            blocks: number of its blocks.
            first: whether it has the embedding.
            last: whether it has the head.
        """
        block_s, embedding_s, head_s = self._both_passes
        return blocks * block_s + embedding_s * first + head_s * last

    @cached_property
    def _both_passes(self) -> tuple[float, float, float]:
        """Seconds of forward and backward of a block, of the embedding and of the head."""
        return sum(self.block) + sum(self.block_tp), sum(self.embedding), sum(self.head)

    def whole_model(self, layers: int) -> float:
        """Return the seconds of forward and backward of a whole model with `layers` blocks on one tensor-parallel
        group, for one micro-batch."""
        return self.stage_s(layers, first=True, last=True)


@dataclass(frozen=True)
class PassTime:
    """Seconds of a forward or backward pass: on the device, on the host that starts its kernels, and in messages for
    which both wait.
    """

    device_s: float = 0.0
    host_s: float = 0.0
    message_s: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.device_s + other.device_s, self.host_s + other.host_s, self.message_s + other.message_s)

    def seconds(self, constants: CostConstants) -> float:
        """Return the seconds until the pass ends: the p-norm of device and host time with p = `overlap_power`, plus the
        seconds of messages.
        """
        power = constants.overlap_power
        if power == 1.0:
            return self.device_s + self.host_s + self.message_s
        longer, shorter = max(self.device_s, self.host_s), min(self.device_s, self.host_s)
        # (a^p + b^p)^(1/p), computed without overflow.
        beside = math.pow(1 + math.pow(shorter / longer, power), 1 / power) if longer else 1.0
        return longer * beside + self.message_s


def roofline(
    work: Workload, links: Links, constants: CostConstants, unit: TensorParallelGroup, micro_batch: int
) -> ModuleTimes:
    """Return the estimated seconds of a stage's parts, from operation counts and the measured speeds of a
    tensor-parallel group.

    Args:
        constants: constants of the group's kind of device.
        unit: the tensor-parallel group.
        micro_batch: sequences of a micro-batch.

    Raises:
        InputError: the topology says nothing about a link between two devices of the group.
    """
    spec, seq_len, tp = work.spec, work.seq_len, len(unit.devices)
    head_tp = work.spec.head_shards(tp)
    head_flops = spec.forward_flops(micro_batch, seq_len, spec.layers)
    logits = spec.logits_bytes(micro_batch, seq_len, head_tp)
    table = work.framework.weight_bytes * spec.embedding_parameters() / head_tp
    block_bytes = work.block_bytes(micro_batch, tp)

    def end(
        flops: float, saved: float, saved_passes: ForwardBackward, table_passes: ForwardBackward, ops: ForwardBackward
    ) -> ForwardBackward:
        forward, backward = (
            _pass_time(
                unit, (1 + side) * flops, saved * saved_passes[side] + table * table_passes[side], ops[side]
            ).seconds(constants)
            for side in (0, 1)
        )
        return forward, backward

    block = _block(work, constants, unit, micro_batch)
    shared = tuple(map(PassTime.__add__, block, _tensor_parallel(work, links, constants, unit, micro_batch)))
    alone = block[0].seconds(constants), block[1].seconds(constants)
    return ModuleTimes(
        block=alone,
        block_tp=(shared[0].seconds(constants) - alone[0], shared[1].seconds(constants) - alone[1]),
        embedding=end(0.0, 0.0, (0.0, 0.0), constants.embedding_passes, constants.embedding_ops),
        head=end(head_flops / head_tp, logits, constants.logits_passes, constants.weight_passes, constants.head_ops),
        block_split=constants.split_passes * block_bytes / unit.bytes_per_s + constants.split_ops * unit.launch_s,
    )


def _pass_time(unit: TensorParallelGroup, flops: float, touched: float, ops: float) -> PassTime:
    """Return the time of a pass on a tensor-parallel group.

    Args:
        flops: FLOPs of one device, as many as large matrix products would make in the same time.
        touched: bytes that one device reads or writes.
        ops: tiny operations that the host starts.
    """
    return PassTime(flops / unit.flops + touched / unit.bytes_per_s, ops * unit.launch_s)


def _block(
    work: Workload, constants: CostConstants, unit: TensorParallelGroup, micro_batch: int
) -> tuple[PassTime, PassTime]:
    """Return the times of a block's forward and of its backward, including what recomputation and sharding add.

    Args:
        micro_batch: sequences of a micro-batch.
    """
    spec, seq_len, tp, memory_options = work.spec, work.seq_len, len(unit.devices), work.memory_options
    whole = spec.forward_flops(micro_batch, seq_len) - spec.forward_flops(micro_batch, seq_len, spec.layers)
    slower = (1 + constants.half_width * tp / spec.dim) / constants.efficiency
    flops, saved = slower * whole / spec.layers / tp, work.block_bytes(micro_batch, tp)
    weights = work.used_weight_bytes * spec.block_parameters() / tp
    scores = [work.attention_bytes(constants.attention_passes, micro_batch, tp, side) for side in (0, 1)]
    saved -= work.kept_score_bytes(micro_batch, tp)
    forward, backward = (
        _pass_time(
            unit,
            (1 + side) * flops,
            saved * constants.activation_passes[side] + scores[side] + weights * constants.weight_passes[side],
            constants.block_ops[side],
        )
        for side in (0, 1)
    )
    if memory_options.zero:
        forward += PassTime(host_s=constants.shard_ops[0] * unit.launch_s)
        backward += PassTime(host_s=constants.shard_ops[1] * unit.launch_s)
    if memory_options.recompute != "none":
        forward += PassTime(host_s=constants.recompute_ops[0] * unit.launch_s)
        backward += PassTime(host_s=(constants.recompute_ops[1] + constants.block_ops[0]) * unit.launch_s)
        if memory_options.recompute == "full":
            touched = saved * constants.activation_passes[0] + scores[0] + weights * constants.weight_passes[0]
        else:
            flops = slower * spec.selective_flops(micro_batch, seq_len) / tp
            touched = scores[0]
            if not work.kept_score_bytes(micro_batch, tp):
                touched = work.selective_bytes(micro_batch, tp) * constants.activation_passes[0]
            if not flops:  # the whole block is computed again except for its products, which are kept
                touched += weights * constants.weight_passes[0]
        backward += _pass_time(unit, flops, touched, 0.0)
    return forward, backward


def _tensor_parallel(
    work: Workload, links: Links, constants: CostConstants, unit: TensorParallelGroup, micro_batch: int
) -> tuple[PassTime, PassTime]:
    """Return the forward and the backward time that tensor parallelism adds to a block.

    Each pass has two all-reduces of the residual stream (Shoeybi et al. 2019), and the dispatch of DTensors. With
    sequence parallelism each all-reduce is a reduce-scatter and an all-gather, which send as many bytes. Full
    recomputation repeats the forward's part in the backward; selective recomputation does so only if
    `selective_sends_again` of `work.framework` is set. Sums in bf16 count as many messages as a ring.

    Args:
        micro_batch: sequences of a micro-batch.
    """
    if len(unit.devices) == 1:
        return PassTime(), PassTime()
    in_bf16 = work.tensor_parallel_sums == "bf16" and unit.spans_nodes
    hop_s = constants.collective_ops * unit.launch_s
    coding_s = 0.0
    if in_bf16:
        numbers = work.stage_boundary_bytes(micro_batch) / work.framework.residual_stream_bytes
        coding_s = 2 * numbers * codec_seconds(unit).bf16

    def added(ops: float, size: float) -> PassTime:
        reduce_s = ring_all_reduce_s(
            links, unit.device_ids, size, hop_s, constants.hierarchical_all_reduce, unit.contention
        )
        # A CPU that sends and receives is busy for this long; all ranks wait until the last one has arrived.
        sent_bytes = 2 * (len(unit.devices) - 1) / len(unit.devices) * size
        sending_s, wait_s = (
            constants.sent_byte_passes * sent_bytes / unit.bytes_per_s,
            constants.wait_ops * unit.launch_s,
        )
        return PassTime(coding_s, ops * unit.launch_s, 2 * (wait_s + max(reduce_s, sending_s)))

    sizes = work.tensor_parallel_bytes(micro_batch, in_bf16)
    forward, backward = map(added, constants.tensor_parallel_ops, sizes)
    recompute = work.memory_options.recompute
    again = recompute == "full" or (recompute == "selective" and work.framework.selective_sends_again)
    return forward, backward + forward if again else backward


def codec_seconds(unit: TensorParallelGroup) -> CodecSeconds:
    """Return the seconds per number with each codec on a tensor-parallel group: measured, or the default of its kind of
    device.
    """
    return unit.codec_s or DEFAULT_CODEC_S[unit.kind]
