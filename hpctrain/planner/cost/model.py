"""Cost model: seconds of a stage, its messages, its all-reduce and its update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from hpctrain.base.collector import cached_method
from hpctrain.planner.cost.collectives import (
    NO_ALL_REDUCE,
    AllReduceTime,
    StageGradients,
    all_reduce_time,
    flat_copy_share,
    low_rank_width,
    mixed_sum_time,
    node_sum_time,
    overlapped_share,
)
from hpctrain.planner.cost.memory import MemoryModel
from hpctrain.planner.cost.roofline import ModuleTimes, codec_seconds, roofline
from hpctrain.planner.cost.shard_collectives import ShardCollectives
from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.constants import COST_CONSTANTS, CostConstants
from hpctrain.planner.devices.links import (
    Links,
    message_alpha_beta,
    ring_hops,
    scalar_all_reduce_s,
)
from hpctrain.planner.devices.placement_links import PlacementLinks, RingGroup, SlowestRates
from hpctrain.planner.devices.tensor_parallel_group import GroupSpec, Placement, TensorParallelGroup
from hpctrain.records.plan.compression import Mixed
from hpctrain.records.plan.gradient_codec import MESSAGES, Messages
from hpctrain.records.topology.topology import CodecSeconds

TENSORS_PER_BLOCK = 9
"""Number of weight tensors of a block that the optimizer is assumed to update, as in a decoder like Llama."""
UnitKind = int
"""Number of a kind of tensor-parallel groups: those with one `GroupSpec` and the same largest alpha and beta between
their devices."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage for one micro-batch. `forward` and `backward` include `tensor_parallel`, the seconds that
    tensor parallelism adds to both together.
    """

    forward: float
    backward: float
    tensor_parallel: float
    inputs: float
    """Seconds of the backward for inputs (I) alone; 0 on the first stage, which sends no gradient."""
    weights: float
    """Seconds of the backward for weights (W) alone; on the first stage, of the whole backward."""

    @property
    def both(self) -> float:
        return self.forward + self.backward


class CostModel:
    """Predicts seconds for one workload on given links; its attribute `memory` predicts peak bytes. Caches its results.

    A method that needs a link raises InputError if the topology says nothing about this link.

    Args:
        work: the workload.
        links: the links between the devices.
        constants: kind of device (cpu or cuda) -> the cost model's constants for it.
    """

    def __init__(self, work: Workload, links: Links, constants: Mapping[str, CostConstants] = COST_CONSTANTS) -> None:
        self.work = work
        self.links = links
        self.constants = constants
        self.memory = MemoryModel(work)
        self.shard_collectives = ShardCollectives(work, constants)
        self.kind = cache(partial(_kind, links, {}))
        """The kind of a tensor-parallel group; groups of one kind take equally long for everything."""
        self._placement_links: dict[int, PlacementLinks] = {}
        self._alpha_beta = cache(lambda source, target: message_alpha_beta(links, source.device_ids, target.device_ids))
        self._parts: dict[tuple[UnitKind, int], ModuleTimes] = {}
        self._stages: dict[tuple[UnitKind, int, ModelPart], StageTime] = {}
        self._updates: dict[tuple[UnitKind, ModelPart, int], float] = {}

    def placement_links(self, placement: Placement) -> PlacementLinks:
        """Return the links of a placement; cached by the identity of the placement object."""
        links = self._placement_links.get(id(placement))
        if links is None:
            links = self._placement_links[id(placement)] = PlacementLinks(placement, self.links)
        return links

    def with_work(self, **changes: Any) -> CostModel:
        """Return a cost model with the links and constants of this one, and with some fields of its workload changed.

        Args:
            changes: fields of `Workload` with their new values.
        """
        other = CostModel(replace(self.work, **changes), self.links, self.constants)
        other.kind, other._placement_links, other._alpha_beta = self.kind, self._placement_links, self._alpha_beta
        return other

    def module_times(self, unit: TensorParallelGroup, micro_batch: int) -> ModuleTimes:
        """Return the times of the model's parts on a tensor-parallel group, for micro-batches of `micro_batch`
        sequences.
        """
        key = (self.kind(unit), micro_batch)
        if key not in self._parts:
            self._parts[key] = roofline(self.work, self.links, self.constants[unit.kind], unit, micro_batch)
        return self._parts[key]

    def stage(self, unit: TensorParallelGroup, micro_batch: int, share: ModelPart) -> StageTime:
        """Return the times of a stage on a tensor-parallel group, for one micro-batch.

        Args:
            micro_batch: sequences of a micro-batch.
            share: the part of the model that the stage holds.
        """
        key = (self.kind(unit), micro_batch, share)
        if key not in self._stages:
            blocks, _ = self.work.mean_blocks(share)
            parts, constants = self.module_times(unit, micro_batch), self.constants[unit.kind]
            self._stages[key] = _stage(parts, share, blocks, constants, unit.launch_s)
        return self._stages[key]

    def send_s(
        self, source: TensorParallelGroup, target: TensorParallelGroup, micro_batch: int, messages: Messages = "none"
    ) -> float:
        """Return the seconds of a stage message from one tensor-parallel group to another if no other group sends,
        without encoding and decoding (`message_cast_s`); 0 within one group.

        Args:
            micro_batch: sequences of a micro-batch.
            messages: codec of the message.
        """
        if source is target:
            return 0.0
        alpha, beta = self._alpha_beta(source, target)
        return alpha + beta * self.work.message_bytes(micro_batch, len(source.devices), messages)

    def stage_message_s(
        self, placement: Placement, replica: int, source: int, target: int, micro_batch: int, messages: Messages
    ) -> float:
        """Return the seconds of a stage message while all replicas send theirs, without encoding and decoding
        (`message_cast_s`); 0 within one pipeline rank.

        Args:
            source: pipeline rank that sends.
            target: pipeline rank that receives, next to `source`.
            micro_batch: sequences of a micro-batch.
            messages: codec of the message.
        """
        if source == target:
            return 0.0
        alpha, beta = self.placement_links(placement).message_alpha_beta(replica, source, target)
        return alpha + beta * self.work.message_bytes(micro_batch, len(placement[0][0].devices), messages)

    def messages(self, a: TensorParallelGroup, b: TensorParallelGroup, stage: int) -> Messages:
        """Return the codec of the messages between stage `stage` on group `a` and the next stage on group `b`; 'none'
        within a node.
        """
        codec = self.work.messages_behind(stage)
        return codec if codec == "none" or crosses_nodes(a, b) else "none"

    def message_cast_s(self, unit: TensorParallelGroup, micro_batch: int, messages: Messages) -> float:
        """Return the seconds that a tensor-parallel group takes to encode a stage message, or to decode one.

        The codec's seconds were measured for each number of an all-reduce, which makes four passes: encode, sum, encode
        again, decode. Each number of the message takes a quarter of them.

        Args:
            micro_batch: sequences of a micro-batch.
            messages: codec of the message.
        """
        rate = MESSAGES[messages].measured_as
        if rate is None:
            return 0.0
        number_s: float = getattr(codec_seconds(unit), rate)
        numbers = self.work.hidden_bytes(micro_batch, len(unit.devices)) / self.work.framework.residual_stream_bytes
        return numbers * number_s / 4

    def optimizer_s(self, unit: TensorParallelGroup, share: ModelPart, shards: int = 1) -> float:
        """Return the seconds to update, on a tensor-parallel group, a stage's parameters or, with several `shards`, one
        of this number of equal shards of them.

        Args:
            share: the part of the model that the stage holds.
        """
        key = (self.kind(unit), share, shards)
        if key not in self._updates:
            constants = self.constants[unit.kind]
            parameters = self.work.parameters(share, len(unit.devices)) / shards
            tensors = share.blocks * TENSORS_PER_BLOCK + share.first + 2 * share.last
            if len(unit.devices) > 1:
                touched, ops = constants.split_optimizer
            elif shards > 1:
                touched, ops = constants.sharded_optimizer
            else:
                touched, ops = constants.optimizer
            self._updates[key] = parameters * touched / unit.bytes_per_s + tensors * ops * unit.launch_s
        return self._updates[key]

    def step_overhead_s(self, unit: TensorParallelGroup) -> float:
        """Return the seconds of a step on a tensor-parallel group that do not depend on how much the step computes."""
        return self.constants[unit.kind].step_ops * unit.launch_s

    def all_reduce_times(
        self, placement: Placement, shares: Sequence[ModelPart], owner: Sequence[int], shards: int = 1
    ) -> list[AllReduceTime]:
        """Return [stage] -> time of the all-reduce of its gradients over the replicas; with hybrid sharding, over the
        shard groups.

        All pipeline ranks reduce at about the same time, so their rings share cards and uplinks. The stages of one rank
        reduce one after the other.

        Args:
            shares: [stage] -> the part of the model that the stage holds.
            owner: [stage] -> its pipeline rank.
            shards: number of consecutive replicas that share a state (a shard group).
        """
        if len(placement) == shards:
            return [NO_ALL_REDUCE] * len(shares)
        links = self.placement_links(placement)
        by_level = shards == 1 and self.work.intra_node != "flat" and links.level_replicas > 1
        replicas = links.level_replicas if by_level else shards
        exact, rings = self.work.codec.exact, links.replicate_ring_groups(replicas, False)
        pairs = rings if exact else links.replicate_ring_groups(replicas, True)
        in_nodes = links.shard_ring_groups(replicas, False) if by_level else None
        group = len(placement[0][0].devices), placement[0][0].kind, len(shares), replicas
        sums = []
        for share, rank in zip(shares, owner, strict=True):
            slowest_s = None
            if not exact or in_nodes is not None:
                slowest_s = slowest_codec([placement[replica][rank] for replica in placement.representatives])
            level = in_nodes[rank] if in_nodes else None
            sums.append(
                self._stage_sum(*group, share, links.slowest_rates[rank], slowest_s, rings[rank], pairs[rank], level)
            )
        return sums

    @cached_method
    def _stage_sum(
        self, tp: int, kind: str, stages: int, replicas: int, share: ModelPart, slowest: SlowestRates,
        codec_s: CodecSeconds | None, rings: RingGroup, pairs: RingGroup, in_nodes: RingGroup | None,
    ) -> AllReduceTime:  # fmt: skip
        """Return the time of the all-reduce of one stage's gradients.

        Args:
            stages: number of stages of the model.
            replicas: number of replicas over which the gradients are divided before they are summed: those of a node,
                with sums by level, or those of a shard group.
            codec_s: seconds per number of each codec on the slowest device; None if they do not count.
            in_nodes: links within nodes of sums by level; None if sums are not by level.
        """
        work, constants, codec, framework = self.work, self.constants[kind], self.work.codec, self.work.framework
        numbers = work.parameters(share, tp) / replicas
        copied = flat_copy_share(work, stages, tp)
        gradients = StageGradients(
            numbers, framework.summed_bytes, low_rank_width(work.spec.dim, tp),
            copied * constants.reducer_bytes / slowest.bytes_per_s, None if codec.exact else codec_s,
            1 / slowest.flops, constants.sent_byte_passes / slowest.bytes_per_s,
        )  # fmt: skip
        if isinstance(codec, Mixed):
            parts = work.group_parameters(share, tp)
            taken = mixed_sum_time(codec, parts, rings, pairs, gradients, framework.bucket_bytes)
        else:
            taken = all_reduce_time(codec, rings, pairs, gradients, framework.bucket_bytes)
        if in_nodes is not None and work.intra_node != "flat":
            whole = gradients._replace(numbers=replicas * numbers, codec_s=codec_s)
            taken = taken.followed_by(node_sum_time(work.intra_node, in_nodes, whole, framework.bucket_bytes))
        return taken

    @cached_method
    def overlapped_share(self, stages: int, tp: int, part: ModelPart | None) -> float:
        """Return what the function `overlapped_share` returns."""
        return overlapped_share(self.work, stages, tp, part)

    def gradient_cast_s(self, placement: Placement, rank: int) -> float:
        """Return the seconds to encode one number of a gradient for a reduce-scatter, on the slowest device of a
        pipeline rank.
        """
        codec = self.work.codec
        if codec.measured_as is None:
            return 0.0
        slowest = slowest_codec([placement[replica][rank] for replica in placement.representatives])
        return codec.reduce_scatter_share * float(getattr(slowest, codec.measured_as))

    def tied_all_reduce_s(self, placement: Placement, first: int, last: int) -> float:
        """Return the seconds to sum the two gradients of a tied embedding, in all replicas at the same time; 0 if it is
        not tied, or if one pipeline rank holds both ends.

        Args:
            first: pipeline rank of the first stage.
            last: pipeline rank of the last stage.
        """
        if not self.work.spec.tied or first == last:
            return 0.0
        numbers = self.work.spec.end_parameters(len(placement[0][first].devices), first=True, last=False)
        size = float(self.work.framework.summed_bytes * numbers)
        return self.placement_links(placement).end_ring_group(first, last).all_reduce_s(size)

    def norm_all_reduce_s(self, placement: Placement) -> float:
        """Return the seconds of the all-reduce of one number over all devices, which clipping by the gradient's norm
        needs.
        """
        devices = len(placement) * len(placement[0]) * len(placement[0][0].devices)
        return scalar_all_reduce_s(self.placement_links(placement).slowest_alpha, devices) if devices > 1 else 0.0


def _kind(links: Links, numbers: dict[tuple[GroupSpec, float, float], UnitKind], unit: TensorParallelGroup) -> UnitKind:
    """Return the number of a group's kind.

    Args:
        numbers: figures of a kind -> its number; gets each new kind.
    """
    hops = ring_hops(unit.device_ids) if len(unit.devices) > 1 else []
    costs = [(0.0, 0.0)]
    for a, b in hops:
        alpha, beta = links.in_a_ring(a, b)
        costs.append((alpha, beta * (unit.contention if a.node != b.node else 1.0)))
    figures = unit.group_spec, max(a for a, _ in costs), max(b for _, b in costs)
    return numbers.setdefault(figures, len(numbers))


def _stage(parts: ModuleTimes, share: ModelPart, blocks: float, constants: CostConstants, launch_s: float) -> StageTime:
    """Return the times of a stage for one micro-batch.

    Args:
        share: says whether the stage holds the embedding and the head; its number of blocks does not count.
        blocks: number of blocks of mean size that take as long as the stage's blocks.
        launch_s: launch time of the slowest device.
    """
    action_s = constants.action_ops * launch_s
    times = [action_s + blocks * (parts.block[side] + parts.block_tp[side]) for side in (0, 1)]
    for present, part in ((share.first, parts.embedding), (share.last, parts.head)):
        if present:
            times = [times[side] + part[side] for side in (0, 1)]
    forward, backward = times
    inputs, weights = 0.0, backward
    if not share.first:
        split = backward + action_s + blocks * parts.block_split
        inputs, weights = constants.inputs_share * split, (1 - constants.inputs_share) * split
    return StageTime(forward, backward, blocks * sum(parts.block_tp), inputs, weights)


def crosses_nodes(a: TensorParallelGroup, b: TensorParallelGroup) -> bool:
    """Return whether any message between two tensor-parallel groups leaves a node."""
    return any(x.node != y.node for x, y in zip(a.device_ids, b.device_ids, strict=True))


def slowest_codec(units: Sequence[TensorParallelGroup]) -> CodecSeconds:
    """Return the seconds per number with each codec: for each codec the largest value of any of the tensor-parallel
    groups.
    """
    known = [codec_seconds(unit) for unit in units]
    return CodecSeconds(**{name: max(getattr(each, name) for each in known) for name in CodecSeconds.model_fields})
