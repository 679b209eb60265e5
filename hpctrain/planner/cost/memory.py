"""Memory model: the peak bytes of a device, and the most blocks that it can hold."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from hpctrain.base.collector import cached_method
from hpctrain.base.even_parts import even_parts
from hpctrain.checkpoint.memory.segment import UNDO_BYTES
from hpctrain.planner.cost.live_micro_batches import LiveCounts, live_micro_batches
from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES, stages_by_rank

IN_FLIGHT_BYTES = 4 * BUCKET_BYTES
"""Bytes of the gradient buckets that a device is sending at one moment, if there are several replicas."""
SNAPSHOT_BYTES = 12
"""Bytes of a parameter and its two moments in a snapshot of the state in memory."""
HEAP_RETAINED_COPIES = {"cpu": (0.0, 2.0, 2.0, 3.3), "cuda": (0.0, 0.0, 0.0, 0.0)}
"""Kind of device -> [ZeRO level] -> fp32 copies of a rank's whole parameters that were freed but that glibc's heap
still holds. Measured on CPU: 1.0 to 2.1 copies at level 1, 1.8 at level 2, 2.5 to 3.3 at level 3, with two replicas of
3 to 29 million parameters (torch 2.13). On CUDA the count is 0, because memory that the allocator caches can be used
again.
"""
COLLECTIVE_PIECES = {"cpu": 5, "cuda": 1}
"""Kind of device -> pieces of gradients (a block, or the part outside of blocks) in the buffers of ZeRO's collectives,
in addition to those that wait for their sum. On a CPU, two reduce-scatters of a rank are on their way while it
computes, each with what is sent and what is received, and a third one is about to start.
"""
STAGE_PIECES = 2
"""Pieces of gradients that each further stage of a CPU rank keeps in the buffers of its reduce-scatters after use: two
that were received; with bf16 as many bytes in four halves, with integers no more."""
CAST_BYTES = 2
"""Bytes per parameter of the copy in bf16 or fp16 that autocast makes for each micro-batch.

The copy stays until the backward pass, even if the weight itself is freed (measured with torch 2.13).
"""
PROCESS_BYTES = {"cpu": 296e6, "cuda": 1.0e9}
"""Kind of device -> bytes of a worker process without tensors. CPU: Python with torch, its pipelining and gloo,
measured 264 to 296 MB without pages of files (torch 2.13): what peaks of workers without ZeRO held beyond the counted
tensors. CUDA: context, kernels and NCCL buffers, an assumption.
"""


class RankRole(NamedTuple):
    """What decides the memory of a device in a plan, except for the number of blocks that the device holds.

    `kind` is cuda or cpu, `schedule` the name of the schedule, and `rank` the pipeline rank. `stages` is the number of
    stages in the pipeline, `micro_batches` that of the device's replica.
    """

    kind: str
    schedule: str
    pp: int
    rank: int
    stages: int
    dp: int
    tp: int
    shards: int
    """Replicas that share a state; 1 if each holds a whole state."""
    micro_batch: int
    micro_batches: int


class _StateRole(NamedTuple):
    """The part of a `RankRole` on which the bytes of a device depend that are equally many for all numbers of
    micro-batches."""

    kind: str
    """Kind of the device: cpu or cuda."""
    splits: bool
    """Whether the backward is split into I and W."""
    ends: tuple[tuple[bool, bool], ...]
    """[stage of the rank] -> (whether it is the model's first stage, whether it is the last one)."""
    dp: int
    """Number of replicas, at most those of two shard groups: the memory depends only on whether there is more than one
    replica and more than one shard group."""
    tp: int
    shards: int

    def shares(self, blocks: tuple[int, ...]) -> list[ModelPart]:
        """Return the parts of the model in the rank's stages, which have these numbers of blocks."""
        return [ModelPart(count, *ends) for ends, count in zip(self.ends, blocks, strict=True)]


class _MemoryRole(NamedTuple):
    """The part of a `RankRole` on which the rank's memory depends. Many roles share one `_MemoryRole`, so predicted
    bytes are cached by it.

    `moments` has the micro-batches of each stage at the moments when the rank keeps the most of them, as
    `live_micro_batches` returns them.
    """

    state: _StateRole
    moments: LiveCounts
    micro_batch: int


def _memory_role(role: RankRole) -> _MemoryRole:
    stages, last = stages_by_rank(role.schedule, role.pp, role.stages)[role.rank], role.stages - 1
    state = _StateRole(
        kind=role.kind,
        splits=role.schedule in SPLIT_BACKWARD_SCHEDULES,
        ends=tuple((stage == 0, stage == last) for stage in stages),
        dp=role.shards * min(role.dp // role.shards, 2),
        tp=role.tp,
        shards=role.shards,
    )
    moments = live_micro_batches(role.schedule, role.pp, role.stages, role.micro_batches)[role.rank]
    return _MemoryRole(state, moments, role.micro_batch)


class MemoryModel:
    """Predicts peak bytes of devices for one workload; caches its results."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._memory_role = cache(_memory_role)
        self._mean_blocks = cache(work.mean_blocks)

    def need(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        """Return the peak bytes of a device.

        Args:
            blocks: number of blocks of each stage that the device holds.
        """
        return self._need_bytes(self._memory_role(role), blocks)

    @cached_method
    def max_blocks(self, role: RankRole, memory_bytes: float) -> int:
        """Return the most blocks that fit into the usable share of `memory_bytes`; -1 if not even a rank without blocks
        fits.
        """
        return self._most_blocks(self._memory_role(role), memory_bytes)

    @cached_method
    def max_blocks_by_rank(self, first: RankRole, memory_bytes: float) -> list[int]:
        """Return [pipeline rank] -> what `max_blocks` returns for the role of the rank.

        Args:
            first: the role of the first rank.
        """
        return [self.max_blocks(first._replace(rank=rank), memory_bytes) for rank in range(first.pp)]

    @cached_method
    def _most_blocks(self, memory_role: _MemoryRole, memory_bytes: float) -> int:
        usable, chunks = self.work.usable * memory_bytes, len(memory_role.state.ends)

        def need(blocks: int) -> float:
            return self._need_bytes(memory_role, even_parts(blocks, chunks))

        low, high = 0, self.work.spec.layers
        if (high_bytes := need(high)) <= usable:
            return high
        if (low_bytes := need(low)) > usable:
            return -1
        while high - low > 1:
            # The bytes grow almost linearly with the blocks (interpolation search).
            guess = low + int((usable - low_bytes) / (high_bytes - low_bytes) * (high - low))
            middle = min(max(guess, low + 1), high - 1)
            if (middle_bytes := need(middle)) <= usable:
                low, low_bytes = middle, middle_bytes
            else:
                high, high_bytes = middle, middle_bytes
        return low

    @cached_method
    def _need_bytes(self, memory_role: _MemoryRole, blocks: tuple[int, ...]) -> float:
        state, moments, micro_batch = memory_role
        sizes, at_work = self._stage_activations(state, micro_batch, blocks)
        if len(sizes) == 1:
            live_bytes = sizes[0] * max(moments)[0]
        else:
            live_bytes = max(sum([live * size for live, size in zip(moment, sizes, strict=True)]) for moment in moments)
        return self._state_bytes(state, blocks) + (1 + self.work.framework.gap_share) * (live_bytes + at_work)

    @cached_method
    def _state_bytes(self, role: _StateRole, blocks: tuple[int, ...]) -> float:
        """Return the bytes of a device without its activations, but with the gaps that gradients leave."""
        shares, process = role.shares(blocks), self.work.framework.process_bytes
        state = self._whole_state(role, shares) if role.shards == 1 else self._sharded_state(role, shares)
        beside = PROCESS_BYTES[role.kind] if process is None else process
        return beside + state + self._segment_bytes(role, shares) + self._gradient_gaps(role, blocks)

    def _gradient_gaps(self, role: _StateRole, blocks: tuple[int, ...]) -> float:
        framework = self.work.framework
        if not framework.gap_share:
            return 0.0
        parameters = sum(self.work.parameters(ModelPart(count, False, False), role.tp) for count in blocks)
        return framework.gap_share * framework.gradient_bytes * parameters

    def _segment_bytes(self, role: _StateRole, shares: list[ModelPart]) -> float:
        """Return the bytes that the memory which outlives a CPU worker takes in addition to weights and moments: the
        reduced gradients, the codec's state after two steps and the undo area of a segment, and snapshots. A topology
        does not have the host memory of GPU workers."""
        work = self.work
        if role.kind != "cpu" or isinstance(work.codec, LocalSteps):
            return 0.0
        parameters = sum(self.work.parameters(share, role.tp) for share in shares)
        piece = parameters / role.shards
        alone, segment = role.shards == role.dp, work.state_outlives
        # Two of the rank's own state and, if no other node has its part, two of another rank's.
        snapshots = 0 if not work.snapshots else 4 if alone else 0 if segment else 2
        codec_states = 0 if role.dp == 1 else 2 * segment + snapshots
        shards = role.shards if role.shards < role.dp else 1
        residuals = codec_states * work.codec.state_bytes(work.spec.dim) * parameters / shards
        own = work.framework.gradient_bytes * piece + UNDO_BYTES if segment else 0.0
        return own + snapshots * SNAPSHOT_BYTES * piece + residuals

    @cached_method
    def _activation_sizes(self, micro_batch: int, tp: int) -> tuple[float, float, float, float]:
        """Return the bytes of one micro-batch's activations on a device, which are equal for every stage.

        Returns:
            Bytes of a block while it computes; bytes that a block keeps from its forward to its backward pass; bytes of
            the residual stream between two stages; bytes of the logits.
        """
        work = self.work
        boundary = work.hidden_bytes(micro_batch, tp)
        saved = work.saved_activation_bytes(micro_batch, tp)
        if tp > 1:
            saved += work.framework.split_streams * boundary
        logits = work.spec.logits_bytes(micro_batch, work.seq_len, work.spec.head_shards(tp))
        return work.block_bytes(micro_batch, tp), saved, boundary, logits

    @cached_method
    def _stage_activations(
        self, role: _StateRole, micro_batch: int, blocks: tuple[int, ...]
    ) -> tuple[list[float], float]:
        """Return ([stage of the rank] -> bytes of a micro-batch's activations that the stage keeps until its backward,
        bytes of the block that computes)."""
        work, shares = self.work, role.shares(blocks)
        block, saved, boundary, logits = self._activation_sizes(micro_batch, role.tp)
        split = work.framework.split_outputs
        restored = 2 * boundary if split else 0.0  # the backward pass restores an output beside its gradient

        def messages(share: ModelPart) -> float:
            # A stage also keeps its input and its output, and of a split output a part. On a CPU, their gradients count
            # too: buffers are there before the gradients are, and sends keep them (`most_sends`).
            if split:
                return boundary / role.tp
            return (4 if role.kind == "cpu" and not (share.first or share.last) else 2) * boundary

        sizes = [
            self._mean_blocks(share)[1] * saved
            + messages(share)
            + logits * share.last
            + self._casts_until_backward(role, share)
            for share in shares
        ]
        # The block that computes also holds gradients and, with recomputation, the activations that it did not keep.
        if work.memory_options.recompute == "none":
            return sizes, block + restored
        return sizes, (block if split else 2 * block) + restored + max(
            self._casts(role, share) - self._casts_until_backward(role, share) for share in shares
        )

    def _casts(self, role: _StateRole, share: ModelPart) -> float:
        """Return the bytes of the low-precision weight copies that autocast makes in a stage's forward pass.

        An embedding has no such copy, because it is no matrix product.
        """
        casts = self.work.casts_weights(sharded=role.shards > 1)
        return CAST_BYTES * self.work.parameters(share._replace(first=False), role.tp) if casts else 0

    def _casts_until_backward(self, role: _StateRole, share: ModelPart) -> float:
        """Return the bytes of the weights' low-precision copies that live until the backward pass.

        With recomputation, the copies of the blocks' weights do not count, because the backward pass makes them again.
        """
        return self._casts(role, share if self.work.memory_options.recompute == "none" else share._replace(blocks=0))

    def _whole_state(self, role: _StateRole, shares: list[ModelPart]) -> float:
        work = self.work
        parameters = sum(self.work.parameters(share, role.tp) for share in shares)
        total = float((work.framework.bytes_per_parameter + work.framework.accumulated_bytes) * parameters)
        if role.dp > 1:
            # Buckets of gradients; a large embedding is a bucket of its own.
            gradient_bytes = work.framework.gradient_bytes
            table = float(gradient_bytes * work.spec.embedding_parameters() / work.spec.head_shards(role.tp))
            total += min(gradient_bytes * parameters, max(IN_FLIGHT_BYTES, table))
            total += self._codec_state_bytes * parameters
            if work.intra_node != "flat":
                total += gradient_bytes * parameters / 2  # parts of a node's sums; at most a half, of two replicas
        return total

    @property
    def _codec_state_bytes(self) -> float:
        """Bytes that the codec keeps between steps for each number of the gradient, including the copy of its state
        that a checkpoint takes.
        """
        copies = 2 if self.work.framework.checkpoint_bytes else 1
        return copies * self.work.codec.state_bytes(self.work.spec.dim)

    def _sharded_state(self, role: _StateRole, shares: list[ModelPart]) -> float:
        """Return the bytes of weights, gradients, optimizer state and residuals on a device with ZeRO.

        The fp32 weights, their gradients, the moments and the copy that is made to save a checkpoint are sharded. In
        addition, a device holds gathered weights: all of them at levels 1 and 2, at level 3 those of two pieces at a
        time (a block and the part outside of blocks). It also holds gradients before their reduce-scatter: all of them
        at level 1, those of two pieces at levels 2 and 3. With a split backward, the device's largest stage takes the
        place of the two pieces. Freed memory that the heap still holds (`HEAP_RETAINED_COPIES`) counts too.

        Args:
            shares: the parts of the model in the device's stages.
        """
        work, zero = self.work, self.work.memory_options.zero
        framework = work.framework
        stages = [work.parameters(share, role.tp) for share in shares]
        parameters = sum(stages)
        outside = max(work.parameters(share._replace(blocks=0), role.tp) for share in shares)
        piece = max(work.parameters(ModelPart(1, False, False), role.tp), outside)
        at_work = max(stages) if role.splits else min(parameters, 2 * piece)
        gradient_bytes = framework.gradient_bytes
        parts = framework.part_bytes * parameters / role.shards
        parts += framework.accumulated_bytes * parameters
        weights = work.gathered_bytes * (parameters if zero < 3 else at_work)
        gradients = gradient_bytes * (parameters if zero == 1 else at_work)
        # Between shard groups a rank sums only its own part; within one it has a residual of the whole gradient.
        shards = role.shards if role.shards < role.dp else 1
        residuals = self._codec_state_bytes * parameters / shards
        freed = HEAP_RETAINED_COPIES[role.kind][zero] * framework.weight_bytes * parameters
        buffers = self._collective_buffers(role.kind, stages, piece)
        return parts + weights + gradients + buffers + residuals + freed

    def _collective_buffers(self, kind: str, stages: list[int], piece: int) -> float:
        """Return the bytes of the buffers of ZeRO's collectives on a device.

        Args:
            kind: kind of the device, cpu or cuda.
            stages: number of parameters of each stage of the device.
            piece: number of parameters of the largest piece: a block, or the part outside of blocks.
        """
        work, framework, parameters = self.work, self.work.framework, sum(stages)
        if framework.shards_in_place:
            return framework.bucket_bytes + framework.gather_buffer_bytes * parameters
        numbers = COLLECTIVE_PIECES[kind] * piece
        if kind == "cpu":
            numbers += STAGE_PIECES * (len(stages) - 1) * piece
        if work.memory_options.zero == 1:
            # Each piece is on its way once a step, as what is sent and received; by level also in another order.
            numbers = min(numbers, (2 if work.intra_node == "flat" else 3) * parameters)
        return float(framework.summed_bytes * numbers)
