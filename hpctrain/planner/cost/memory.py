"""How much memory a device needs, and how much of it a plan may use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.planner.cost.live_activations import LiveCounts, live_micro_batches
from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.records.plan.codec import BUCKET_BYTES, kept_bytes
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import stages_by_rank

IN_FLIGHT_BYTES = 4 * BUCKET_BYTES
"""With several replicas: the buffers of gradients that are on the wire."""
HEAP_RETAINED_COPIES = {"cpu": (0.0, 2.0, 2.0, 3.3), "cuda": (0.0, 0.0, 0.0, 0.0)}
"""[level of ZeRO] -> fp32 copies of a rank's whole parameters that were gathered or summed, freed, and still lie in the
process, as glibc's heap keeps them. CPU: 1.0 to 2.1 seen at level 1, 1.8 at level 2, 2.5 to 3.3 at level 3, on two
replicas of 3 to 29 million parameters (torch 2.13). CUDA: what the allocator keeps does not count."""
CAST_BYTES = 2
"""Per parameter in bf16 and fp16: the copy that autocast makes anew for each micro-batch and keeps until its backward
pass, whether or not the weight itself is freed (seen with torch 2.13)."""
PROCESS_BYTES = {"cpu": 446e6, "cuda": 1.0e9}
"""Before any tensor. CPU: Python with torch, its pipelining and gloo, measured 317 MB (torch 2.13), and what a worker's
resident peak held beside its tensors, 40 to 129 MB. CUDA: context, kernels and NCCL buffers, an assumption."""


class RankRole(NamedTuple):
    """Where a device stands in a plan: everything but the blocks that decides what it keeps."""

    kind: str
    schedule: str
    pp: int
    rank: int
    stages: int
    dp: int
    tp: int
    shards: int
    """Replicas that share a state; 1: it is whole on each."""
    micro_batch: int
    micro_batches: int


class _MemoryRole(NamedTuple):
    """What of a role decides the bytes: many roles have the same."""

    kind: str
    splits: bool
    """Whether the backward is cut in two."""
    ends: tuple[tuple[bool, bool], ...]
    """By stage of the rank: whether it is the model's first, or last."""
    moments: LiveCounts
    dp: int
    """Up to two groups that share a state: whether there are more matters, not how many."""
    tp: int
    shards: int
    micro_batch: int


def _memory_role(role: RankRole) -> _MemoryRole:
    stages, last = stages_by_rank(role.schedule, role.pp, role.stages)[role.rank], role.stages - 1
    return _MemoryRole(
        kind=role.kind,
        splits=role.schedule in SPLIT_BACKWARD_SCHEDULES,
        ends=tuple((stage == 0, stage == last) for stage in stages),
        moments=live_micro_batches(role.schedule, role.pp, role.stages, role.micro_batches)[role.rank],
        dp=role.shards * min(role.dp // role.shards, 2),
        tp=role.tp,
        shards=role.shards,
        micro_batch=role.micro_batch,
    )


@dataclass(eq=False)
class _RoleCache:
    """What was worked out for a standing."""

    memory_role: _MemoryRole
    needs: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Bytes by blocks."""
    most: dict[float, int] = field(default_factory=dict)
    """Blocks by bytes of memory."""


class _ActivationSizes(NamedTuple):
    """Bytes on a device by micro-batch and tp, whatever the stage."""

    block: float
    """Of a block that is at work."""
    kept: float
    """Of a block from its forward to its backward pass."""
    boundary: float
    logits: float


class MemoryModel:
    """Answers with bytes; remembers what it computed."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._sizes: dict[tuple[int, int], _ActivationSizes] = {}
        self._caches: dict[_MemoryRole, _RoleCache] = {}
        self._by_role: dict[RankRole, _RoleCache] = {}
        self._parameters: dict[tuple[ModelPart, int], int] = {}
        self._means: dict[ModelPart, float] = {}

    def need(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        """Peak bytes of a device whose stages (one, or several chunks) hold these numbers of blocks."""
        return self._need(self._cache_of(role), blocks)

    def max_blocks(self, role: RankRole, memory_bytes: float) -> int:
        """The most blocks that fit into the usable part of that memory; -1 when not even none."""
        cache = self._cache_of(role)
        found = cache.most.get(memory_bytes)
        if found is None:
            found = cache.most[memory_bytes] = self._find_most(cache, self.work.usable * memory_bytes)
        return found

    def _cache_of(self, role: RankRole) -> _RoleCache:
        found = self._by_role.get(role)
        if found is None:
            memory_role = _memory_role(role)
            found = self._by_role[role] = self._caches.setdefault(memory_role, _RoleCache(memory_role))
        return found

    def _need(self, cache: _RoleCache, blocks: tuple[int, ...]) -> float:
        found = cache.needs.get(blocks)
        if found is None:
            found = cache.needs[blocks] = self._compute(cache.memory_role, blocks)
        return found

    def _find_most(self, cache: _RoleCache, usable_bytes: float) -> int:
        low, high, chunks = -1, self.work.spec.layers, len(cache.memory_role.ends)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._need(cache, blocks_by_virtual_stage(middle, chunks)) <= usable_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _compute(self, memory_role: _MemoryRole, blocks: tuple[int, ...]) -> float:
        shares = [ModelPart(count, *ends) for ends, count in zip(memory_role.ends, blocks, strict=True)]
        whole = memory_role.shards == 1
        state = self._whole_state(memory_role, shares) if whole else self._sharded_state(memory_role, shares)
        process = self.work.framework.process_bytes
        beside = PROCESS_BYTES[memory_role.kind] if process is None else process
        return beside + state + self._activations(memory_role, shares)

    def _count(self, share: ModelPart, tp: int) -> int:
        """Parameters of a stage on one of `tp` devices."""
        key = (share, tp)
        if key not in self._parameters:
            self._parameters[key] = self.work.parameters(share, tp)
        return self._parameters[key]

    def _mean_blocks(self, share: ModelPart) -> float:
        """How many blocks of mean size a stage amounts to in what it keeps."""
        if share not in self._means:
            self._means[share] = self.work.mean_blocks(share)[1]
        return self._means[share]

    def _sizes_of(self, micro_batch: int, tp: int) -> _ActivationSizes:
        if (micro_batch, tp) not in self._sizes:
            work = self.work
            boundary = work.hidden_bytes(micro_batch, tp)
            kept = work.saved_activation_bytes(micro_batch, tp)
            if tp > 1:
                kept += work.framework.split_streams * boundary
            logits = work.spec.logits_bytes(micro_batch, work.seq_len, work.head_shards(tp))
            self._sizes[micro_batch, tp] = _ActivationSizes(work.block_bytes(micro_batch, tp), kept, boundary, logits)
        return self._sizes[micro_batch, tp]

    def _activations(self, memory_role: _MemoryRole, shares: list[ModelPart]) -> float:
        work = self.work
        block, kept, boundary, logits = self._sizes_of(memory_role.micro_batch, memory_role.tp)
        # What came in and what goes out is kept beside the blocks' own.
        each = [
            self._mean_blocks(share) * kept + 2 * boundary + logits * share.last + self._kept_casts(memory_role, share)
            for share in shares
        ]
        most = max(sum(live * size for live, size in zip(moment, each, strict=True)) for moment in memory_role.moments)
        # The block that is at work holds gradients and, when it is computed again, what it did not keep.
        if work.memory_options.recompute == "none":
            return most + block
        return (
            most
            + 2 * block
            + max(self._casts(memory_role, share) - self._kept_casts(memory_role, share) for share in shares)
        )

    def _casts(self, memory_role: _MemoryRole, share: ModelPart) -> float:
        """The copies of a stage's weights that autocast makes in one forward pass; an embedding has none, it is no
        matrix product."""
        casts = self.work.casts_weights(sharded=memory_role.shards > 1)
        return CAST_BYTES * self._count(share._replace(first=False), memory_role.tp) if casts else 0

    def _kept_casts(self, memory_role: _MemoryRole, share: ModelPart) -> float:
        """Those that live until the backward pass; a block that is computed again makes its own again."""
        return self._casts(
            memory_role, share if self.work.memory_options.recompute == "none" else share._replace(blocks=0)
        )

    def _whole_state(self, memory_role: _MemoryRole, shares: list[ModelPart]) -> float:
        work = self.work
        parameters = sum(self._count(share, memory_role.tp) for share in shares)
        total = float(work.framework.bytes_per_parameter * parameters)
        if memory_role.dp > 1:
            # The buckets that gradients are summed in; a large embedding is one of its own.
            each = work.framework.gradient_bytes
            table = float(each * work.spec.embedding_parameters() / work.head_shards(memory_role.tp))
            total += min(each * parameters, max(IN_FLIGHT_BYTES, table)) + self._kept_bytes * parameters
        return total

    @property
    def _kept_bytes(self) -> float:
        """What the codec keeps for each number that it sums, and its copy while a checkpoint is written."""
        copies = 2 if self.work.framework.checkpoint_bytes else 1
        return copies * kept_bytes(self.work.codec, self.work.spec.dim)

    def _sharded_state(self, memory_role: _MemoryRole, shares: list[ModelPart]) -> float:
        """Weights, gradients and optimizer with ZeRO: a part of each on every device, and what is whole for a while.

        The parts are fp32 weights, their gradients, moments and the copy for a checkpoint. Whole are: at levels 1 and 2
        the weights as they are gathered; at level 1 the gradients; above, those of a block and of what stands
        outside of blocks, which are summed when both are at work. A backward that is cut in two has them stage by
        stage. One more piece is held by the buffers of the collectives.
        """
        work, zero = self.work, self.work.memory_options.zero
        stages = [self._count(share, memory_role.tp) for share in shares]
        parameters = sum(stages)
        outside = max(self._count(share._replace(blocks=0), memory_role.tp) for share in shares)
        piece = max(self._count(ModelPart(1, False, False), memory_role.tp), outside)
        at_work = max(stages) if memory_role.splits else min(parameters, 2 * piece)
        gradient_bytes = work.framework.gradient_bytes
        parts = work.framework.bytes_per_parameter * parameters / memory_role.shards
        weights = work.gathered_bytes * (parameters if zero < 3 else at_work)
        gradients = gradient_bytes * (parameters if zero == 1 else at_work)
        # Between copies a rank sums its part alone; within one state it has something to send of the whole gradient.
        kept = self._kept_bytes * parameters / (memory_role.shards if memory_role.shards < memory_role.dp else 1)
        freed = HEAP_RETAINED_COPIES[memory_role.kind][zero] * work.framework.weight_bytes * parameters
        return parts + weights + gradients + gradient_bytes * piece + kept + freed


def blocks_by_virtual_stage(count: int, chunks: int) -> tuple[int, ...]:
    """A rank's blocks over its stages: equal, the rest to the earlier ones."""
    return tuple(count // chunks + (chunk < count % chunks) for chunk in range(chunks))
