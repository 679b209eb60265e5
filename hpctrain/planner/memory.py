"""How much memory a device needs, and how much of it a plan may use."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hpctrain.planner.workload import Share, Workload
from hpctrain.records.codec import BUCKET_BYTES, kept_bytes
from hpctrain.schedule.generate import SPLIT_BACKWARD, make_schedule
from hpctrain.schedule.placement import stages_by_rank

FLYING_BYTES = 4 * BUCKET_BYTES
"""With several replicas: the buffers of gradients that are on the wire."""
FREED_COPIES = {"cpu": (0.0, 2.0, 2.0, 3.3), "cuda": (0.0, 0.0, 0.0, 0.0)}
"""[level of ZeRO] -> fp32 copies of a rank's whole parameters that were gathered or summed, freed, and still lie in the
process, as glibc's heap keeps them. CPU: 1.0 to 2.1 seen at level 1, 1.8 at level 2, 2.5 to 3.3 at level 3, on two
replicas of 3 to 29 million parameters (torch 2.13). CUDA: what the allocator keeps does not count."""
CAST_BYTES = 2
"""Per parameter in bf16 and fp16: the copy that autocast makes anew for each micro-batch and keeps until its backward
pass, whether or not the weight itself is freed (seen with torch 2.13)."""
PROCESS_BYTES = {"cpu": 440e6, "cuda": 1.0e9}
"""Before any tensor. CPU: Python with torch, its pipelining and gloo, measured 317 MB (torch 2.13), and what a worker's
resident peak held beside its tensors, 40 to 110 MB. CUDA: context, kernels and NCCL buffers, an assumption."""


Moments = tuple[tuple[int, ...], ...]
"""Numbers of micro-batches, one a stage of a rank, at several moments."""


@lru_cache(maxsize=4096)
def live_micro_batches(
    schedule: str, pp: int, stages: int, micro_batches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """How many micro-batches' activations each stage of a pipeline rank keeps at the fullest moments.

    Counted in the action table: from F on, until B or, where the backward is cut in two, W. Tables of gpipe and 1f1b
    are fullest after their first forwards.

    Returns:
        [rank] -> the moments that no other one exceeds in every stage, each with a number a stage of the rank.
    """
    if schedule == "gpipe":
        return (((micro_batches,),),) * pp
    if schedule == "1f1b":
        return tuple(((min(pp - rank, micro_batches),),) for rank in range(pp))
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds == 0:
        # Every round is like the one before it, so the first three say how full it gets.
        micro_batches = min(micro_batches, 3 * micro_batches // rounds)
    table = make_schedule(schedule, pp, stages, micro_batches)
    return tuple(
        _fullest_moments([(own.index(action.stage), action.kind) for action in row], len(own))
        for row, own in zip(table.ranks, stages_by_rank(schedule, pp, stages), strict=True)
    )


def _fullest_moments(actions: list[tuple[int, str]], chunks: int) -> Moments:
    live, moments = [0] * chunks, set()
    for chunk, kind in actions:
        live[chunk] += {"F": 1, "I": 0}.get(kind, -1)
        if kind == "F":
            moments.add(tuple(live))
    fullest: list[tuple[int, ...]] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(x >= y for x, y in zip(other, moment, strict=True)) for other in fullest):
            fullest.append(moment)
    return tuple(fullest)


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


def _as_full(role: RankRole) -> int:
    """The fewest micro-batches that fill the device as much: every round is like the one before it."""
    if role.schedule == "gpipe":
        return role.micro_batches
    if role.schedule in ("1f1b", "zbv"):
        return min(role.micro_batches, 2 * role.pp)
    # The first rounds are longer by one where the numbers do not divide.
    longer = role.micro_batches % role.pp
    return min(role.micro_batches, (longer + 3) * role.pp + longer)


def _alike(role: RankRole) -> RankRole:
    """One of the roles that fill a device as much: whether there are replicas matters, not how many."""
    return role._replace(dp=role.shards * min(role.dp // role.shards, 2), micro_batches=_as_full(role))


class _Sizes(NamedTuple):
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
        self._sizes: dict[tuple[int, int], _Sizes] = {}
        self._needs: dict[tuple[RankRole, tuple[int, ...]], float] = {}
        self._most: dict[tuple[RankRole, float], int] = {}
        self._parameters: dict[tuple[Share, int], int] = {}
        self._means: dict[Share, float] = {}

    def need(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        """Peak bytes of a device whose stages (one, or several chunks) hold these numbers of blocks."""
        found = self._needs.get((role, blocks))
        if found is None:
            alike = _alike(role)
            found = self._needs.get((alike, blocks))
            if found is None:
                found = self._needs[alike, blocks] = self._compute(alike, blocks)
            self._needs[role, blocks] = found
        return found

    def most_blocks(self, role: RankRole, memory_bytes: float) -> int:
        """The most blocks that fit into the usable part of that memory; -1 when not even none."""
        found = self._most.get((role, memory_bytes))
        if found is None:
            alike = _alike(role)
            found = self._most.get((alike, memory_bytes))
            if found is None:
                found = self._most[alike, memory_bytes] = self._find_most(alike, memory_bytes)
            self._most[role, memory_bytes] = found
        return found

    def _find_most(self, role: RankRole, memory_bytes: float) -> int:
        low, high, chunks = -1, self.work.spec.layers, role.stages // role.pp
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.need(role, in_chunks(middle, chunks)) <= self.work.usable * memory_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _compute(self, role: RankRole, blocks: tuple[int, ...]) -> float:
        stages = stages_by_rank(role.schedule, role.pp, role.stages)[role.rank]
        shares = [
            Share(count, stage == 0, stage == role.stages - 1) for stage, count in zip(stages, blocks, strict=True)
        ]
        state = self._sharded_state(role, shares) if role.shards > 1 else self._whole_state(role, shares)
        process = self.work.framework.process_bytes
        beside = PROCESS_BYTES[role.kind] if process is None else process
        return beside + state + self._activations(role, shares)

    def _count(self, share: Share, tp: int) -> int:
        """Parameters of a stage on one of `tp` devices."""
        key = (share, tp)
        if key not in self._parameters:
            self._parameters[key] = self.work.parameters(share, tp)
        return self._parameters[key]

    def _mean_blocks(self, share: Share) -> float:
        """How many blocks of mean size a stage amounts to in what it keeps."""
        if share not in self._means:
            self._means[share] = self.work.mean_blocks(share)[1]
        return self._means[share]

    def _sizes_of(self, micro_batch: int, tp: int) -> _Sizes:
        if (micro_batch, tp) not in self._sizes:
            work = self.work
            boundary = work.hidden_bytes(micro_batch, tp)
            kept = work.kept_bytes(micro_batch, tp)
            if tp > 1:
                kept += work.framework.split_streams * boundary
            logits = work.spec.logits_bytes(micro_batch, work.seq_len, work.head_shards(tp))
            self._sizes[micro_batch, tp] = _Sizes(work.block_bytes(micro_batch, tp), kept, boundary, logits)
        return self._sizes[micro_batch, tp]

    def _activations(self, role: RankRole, shares: list[Share]) -> float:
        work = self.work
        block, kept, boundary, logits = self._sizes_of(role.micro_batch, role.tp)
        # What came in and what goes out is kept beside the blocks' own.
        each = [
            self._mean_blocks(share) * kept + 2 * boundary + logits * share.last + self._kept_casts(role, share)
            for share in shares
        ]
        moments = live_micro_batches(role.schedule, role.pp, role.stages, role.micro_batches)[role.rank]
        most = max(sum(live * size for live, size in zip(moment, each, strict=True)) for moment in moments)
        # The block that is at work holds gradients and, when it is computed again, what it did not keep.
        if work.saving.recompute == "none":
            return most + block
        return most + 2 * block + max(self._casts(role, share) - self._kept_casts(role, share) for share in shares)

    def _casts(self, role: RankRole, share: Share) -> float:
        """The copies of a stage's weights that autocast makes in one forward pass; an embedding has none, it is no
        matrix product."""
        casts = self.work.casts_weights(sharded=role.shards > 1)
        return CAST_BYTES * self._count(share._replace(first=False), role.tp) if casts else 0

    def _kept_casts(self, role: RankRole, share: Share) -> float:
        """Those that live until the backward pass; a block that is computed again makes its own again."""
        return self._casts(role, share if self.work.saving.recompute == "none" else share._replace(blocks=0))

    def _whole_state(self, role: RankRole, shares: list[Share]) -> float:
        work = self.work
        parameters = sum(self._count(share, role.tp) for share in shares)
        total = float(work.framework.bytes_per_parameter * parameters)
        if role.dp > 1:
            # The buckets that gradients are summed in; a large embedding is one of its own.
            each = work.framework.gradient_bytes
            table = float(each * work.spec.embedding_parameters() / work.head_shards(role.tp))
            total += min(each * parameters, max(FLYING_BYTES, table)) + self._kept_bytes * parameters
        return total

    @property
    def _kept_bytes(self) -> float:
        """What the codec keeps for each number that it sums, and its copy while a checkpoint is written."""
        copies = 2 if self.work.framework.checkpoint_bytes else 1
        return copies * kept_bytes(self.work.codec, self.work.spec.dim)

    def _sharded_state(self, role: RankRole, shares: list[Share]) -> float:
        """Weights, gradients and optimizer with ZeRO: a part of each on every device, and what is whole for a while.

        The parts are fp32 weights, their gradients, moments and the copy for a checkpoint. Whole are: at levels 1 and 2
        the weights as they are gathered; at level 1 the gradients; above, those of a block and of what stands
        outside of blocks, which are summed when both are at work. A backward that is cut in two has them stage by
        stage. One more piece is held by the buffers of the collectives.
        """
        work, zero = self.work, self.work.saving.zero
        stages = [self._count(share, role.tp) for share in shares]
        parameters = sum(stages)
        outside = max(self._count(share._replace(blocks=0), role.tp) for share in shares)
        piece = max(self._count(Share(1, False, False), role.tp), outside)
        at_work = max(stages) if role.schedule in SPLIT_BACKWARD else min(parameters, 2 * piece)
        gradient_bytes = work.framework.gradient_bytes
        parts = work.framework.bytes_per_parameter * parameters / role.shards
        weights = work.gathered_bytes * (parameters if zero < 3 else at_work)
        gradients = gradient_bytes * (parameters if zero == 1 else at_work)
        # Between copies a rank sums its part alone; within one state it has something to send of the whole gradient.
        kept = self._kept_bytes * parameters / (role.shards if role.shards < role.dp else 1)
        freed = FREED_COPIES[role.kind][zero] * work.framework.weight_bytes * parameters
        return parts + weights + gradients + gradient_bytes * piece + kept + freed


def in_chunks(count: int, chunks: int) -> tuple[int, ...]:
    """A rank's blocks over its stages: equal, the rest to the earlier ones."""
    return tuple(count // chunks + (chunk < count % chunks) for chunk in range(chunks))
