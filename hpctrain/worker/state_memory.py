"""The shared memory of a worker's training state: whether the worker uses it, and how a generation starts from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.agent.worker_messages import MemoryOrder, StartOrder
from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.checkpoint.memory.codec_state import load_codec_state, own_codec_state
from hpctrain.checkpoint.memory.live_state import LiveState, SegmentOwner, describe, dtypes_fit
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.private_state import PrivateState
from hpctrain.checkpoint.memory.restore import RestoredState, finish_everywhere, load_from_segments
from hpctrain.checkpoint.memory.segment import BUCKET_BYTES, IndexEntry
from hpctrain.checkpoint.memory.snapshots import LiveSource, SnapshotRing, SnapshotSource, check_snapshot
from hpctrain.checkpoint.state import collect
from hpctrain.compress.build import compresses
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.fsdp import padded_shards
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.records.plan.levels import part_shape
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run


class MemoryUnusableError(CheckpointError):
    """The state in memory cannot be restored; the agents go on with a checkpoint."""


def starts_later(order: StartOrder) -> bool:
    """Return whether a worker starts from a state, and not from the run's first weights."""
    return order.restore is not None or (order.memory is not None and order.memory.source is not None)


@dataclass
class StateMemory:
    """The segment of this rank, and those of an old generation that it reads."""

    order: MemoryOrder
    owner: SegmentOwner
    plan: Plan
    clip_norm: float | None
    """Norm to which gradients are clipped; None: they are not."""
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    """All ranks of the generation, with gloo."""
    folder: Path
    """The run folder."""
    fits: bool
    """Whether segments and snapshots can hold the state."""
    live: LiveState | None = None
    """The state of this rank in its segment, once `restore` has returned; None: it lies in the process's own memory."""
    _adopted: MappedSegment | None = field(default=None)
    """The segment that this rank continues on; None if it has a new one."""
    _old: list[MappedSegment] = field(default_factory=list)
    """Segments of another generation that this rank reads for all ranks."""

    @classmethod
    def open(
        cls,
        order: StartOrder,
        folder: Path,
        run: Run,
        plan: Plan,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
    ) -> StateMemory | None:
        """Return the memory that the agent's order gives; None if it gives none.

        With local SGD, `fits` is false, because the replicas have different states between outer syncs.
        """
        if order.memory is None:
            return None
        local_sgd = isinstance(plan.codec, LocalSteps) and plan.dp > 1
        fits = dtypes_fit(pipeline.parameters()) and not local_sgd
        owner = SegmentOwner(order.generation, order.rank, plan.sha256(), plan.world_size)
        clip_norm = run.optimizer.clip_norm
        return cls(order.memory, owner, plan, clip_norm, pipeline, optimizer, group, folder, fits=fits)

    def restore(self) -> RestoredState | None:
        """Move the state of this rank into its segment, and load what the order names. Collective over all ranks.
        Return what was loaded beside tensors; None if the order names no state in memory.

        Raises:
            MemoryUnusableError: the segments cannot be used; they hold no state from then on.
        """
        source = self.order.source
        in_place = source is not None and bool(source.continued)
        descriptors = (self.order.live,) if in_place else self.order.segments
        segments: list[MappedSegment] = []
        try:
            ranks = self.plan.world_size
            segments += [MappedSegment(descriptor, ranks) for descriptor in descriptors if descriptor is not None]
            if not in_place:
                for segment in segments:
                    check_snapshot(segment)
            restored = finish_everywhere(segments, source.step, self.group) if source is not None else None
            named = self.pipeline.parameters()
            if in_place:
                self._adopted = segments[0]
                self.live = LiveState.adopt(segments[0], named, self.optimizer, self.clip_norm, self._padded())
                return restored
            self._old = segments
            self.live = self._fill()
            if source is not None:
                load_from_segments(collect(named, self.optimizer), segments, self.group)
            return restored
        except (CheckpointError, OSError) as error:
            raise self._unusable(segments, error) from error

    def _fill(self) -> LiveState | None:
        """Move the state of this rank into its new segment. Return None, on all ranks, if a rank has none or no memory
        for it: the state is then lost with the processes. Collective."""
        made = None
        if self.fits and self.order.live is not None:
            named, padded = self.pipeline.parameters(), self._padded()
            try:
                made = LiveState.fill(self.order.live, self.owner, named, self.optimizer, self.clip_norm, padded)
            except OSError as error:
                self.fits = False
                print(f"hpctrain: no shared memory for the state, which ends with the workers: {error}", flush=True)
        everywhere = torch.tensor(int(made is not None))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self.group)
        return made if everywhere else None

    def restore_reducer(self, reducer: Reducer) -> str | None:
        """Load what reducers kept between steps. Collective. Return why a part of it is dropped; None if all of it was
        loaded, or if there was nothing to load.

        Raises:
            MemoryUnusableError: a segment is damaged, the file of the old plan cannot be read or used, or the reducer
                expects a tensor of another shape. This rank's segments hold no state from then on.
        """
        source = self.order.source
        if source is None:
            return None
        segments = [self._adopted] if self._adopted is not None else self._old
        try:
            if self._adopted is not None:
                state, dropped = own_codec_state(self._adopted, source, self.plan)
            else:
                plans = Plan.read(self.folder / source.plan, owned=True), self.plan
                compressed = self._compressed()
                state, dropped = load_codec_state(segments, source, plans, self.owner.rank, compressed, self.group)
            if state:
                reducer.load_state(state)
            return dropped
        except (CheckpointError, InputError, OSError) as error:
            raise self._unusable(segments, error) from error

    def _compressed(self) -> list[tuple[int, IndexEntry]]:
        """Return (its number among all of this rank's parameters, its entry of the index) for each parameter whose
        gradient the codec may compress."""
        index = describe(self.pipeline.parameters(), self.optimizer, self.clip_norm, self._padded(), BUCKET_BYTES)
        entries = enumerate(index.entries)
        ranks = self.plan.part_replicas
        return [(n, e) for n, e in entries if compresses(self.plan.codec, part_shape(e.chunk_shape, ranks), e.name)]

    @staticmethod
    def _unusable(segments: Sequence[MappedSegment], error: Exception) -> MemoryUnusableError:
        """Return the error for segments that cannot be used; they hold no state from now on."""
        for segment in segments:
            segment.control.set_state(None)
        return MemoryUnusableError(str(error))

    def commit(self, restored: RestoredState, reducer: Reducer) -> None:
        """Say that the new segment holds the loaded state, and wait until all ranks have said so. Collective."""
        if self.live is not None and self._adopted is None:
            self.live.commit(restored.step, restored.loss_scale, reducer.state())
        if self.order.source is not None:
            # From here on the old segments are not needed, on any node.
            dist.barrier(self.group)

    def open_ring(self, run: Run) -> SnapshotRing | None:
        """Return the snapshots of the state, here and on other nodes; None if an agent gave no memory for them, or if
        `fits` is false on a rank. Collective over all ranks."""
        memory = {part.rank: part.descriptors for part in self.order.snapshots}
        able = torch.tensor(int(self.fits and self.owner.rank in memory))
        dist.all_reduce(able, dist.ReduceOp.MIN, group=self.group)
        if not able:
            return None
        source: SnapshotSource
        if self.live is not None:
            source = LiveSource(self.live.segment, self.plan.world_size)
        else:
            named, padded = self.pipeline.parameters(), self._padded()
            source = PrivateState(self.owner, named, self.optimizer, self.clip_norm, padded)
        every = run.recovery.snapshot_every
        # A separate group: the thread that sends snapshots must not mix its messages with those of training.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * run.step_timeout_s))
        own = memory.pop(self.owner.rank)
        return SnapshotRing(source, own, memory, every if isinstance(every, int) else None, group)

    def _padded(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        parts = [padded_shards(stage.submod) for stage in self.pipeline.stages]
        return {parameter: memory for part in parts for parameter, memory in part.items()}
