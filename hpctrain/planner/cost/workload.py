"""The work of a training step, and what the run file says about how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions, memory_options_of_run
from hpctrain.planner.devices.constants import HPCTRAIN_FRAMEWORK, Framework
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.compression import AutoCompression, Codec, NoCompression
from hpctrain.records.plan.gradient_codec import FULL_BYTES, MESSAGES, IntraNode, Messages, TensorParallelSums
from hpctrain.records.plan.layer_groups import LayerGroup
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.run.run import FixedParallel, Run
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

NO_CODEC = NoCompression()
USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory that a plan may fill (the paper, section 3.4); the allocator needs the rest."""


STAGE_ENDS = ((False, False), (True, False), (False, True))
"""(holds the embedding, holds the head) of a middle, a first and a last stage, in a model of several stages."""


class ScheduleSpec(NamedTuple):
    """A schedule and its number of stages on each pipeline rank (`virtual_stages`)."""

    name: str
    virtual_stages: int = 1

    def __str__(self) -> str:
        return self.name if self.virtual_stages == 1 else f"{self.name} with {self.virtual_stages} stages a rank"


SCHEDULE_SPECS = (
    ScheduleSpec("1f1b"),
    ScheduleSpec("gpipe"),
    ScheduleSpec("interleaved_1f1b", 2),
    ScheduleSpec("interleaved_zero_bubble"),
    ScheduleSpec("interleaved_zero_bubble", 2),
    ScheduleSpec("zbv", 2),
)
"""Schedules that a search tries. Of equally fast ones the first in this order wins. The first entry also keeps the
fewest activations.
"""
FEWEST_ACTIVATIONS = SCHEDULE_SPECS[0]
"""The schedule with the fewest live activations: no other schedule keeps fewer micro-batches in any stage when a rank
is fullest.

A V-shaped schedule may still fit where this schedule does not, because its first and last stage share a rank.
"""


class ModelPart(NamedTuple):
    """The part of the model that a stage holds: a number of blocks, and possibly an end of the model.

    The `first` stage holds the embedding, the `last` stage the last norm and the head.
    """

    blocks: int
    first: bool
    """Whether the stage holds the embedding."""
    last: bool
    """Whether the stage holds the last norm and the head."""

    @property
    def pieces(self) -> int:
        """Number of the stage's modules that have collectives of their own if the state is sharded."""
        return self.blocks + (self.first or self.last)


@dataclass(frozen=True)
class Workload:
    """The model, the batch and the settings of a training step, from which the cost model predicts time and memory."""

    spec: Spec
    sequences: int
    """Sequences of the global batch."""
    seq_len: int
    precision: str
    fixed: FixedParallel | None = None
    """Degrees that the run file fixes; None if it fixes none."""
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS
    """ZeRO, recomputation and sequence parallelism."""
    compiled: bool = False
    """Whether blocks are compiled. Compiled blocks cannot be tensor-parallel, and their backward cannot be split into I
    and W.
    """
    framework: Framework = HPCTRAIN_FRAMEWORK
    """How many bytes the training framework uses for a number, and whether a rank waits while it sends."""
    codec: Codec = NO_CODEC
    """The codec of the gradients; the default sums exactly."""
    intra_node: IntraNode = "flat"
    """How the replicas of a node sum gradients before the codec sums over the nodes, where that is possible."""
    tensor_parallel_sums: TensorParallelSums = "none"
    """How tensor-parallel groups that span nodes sum activations."""
    messages: Messages | tuple[Messages, ...] = "none"
    """The codec of stage messages between nodes: one for all stages, or [stage] -> codec of messages to the next
    stage.
    """
    usable: float = USABLE_MEMORY_SHARE
    """Share of a device's memory that a plan may fill."""
    state_outlives: bool = False
    """Whether CPU workers train on memory that outlives them (`recovery.memory: auto`)."""
    snapshots: bool = False
    """Whether snapshots of the state are made (`recovery.snapshot_every`)."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one value in the input or output of a matrix product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Bytes of each number of the weights that sharding gathers: 2 in bf16 and fp16 if the numbers are cast before
        the all-gather, else 4.
        """
        return self.value_bytes if self.spec.gathers_in_compute_dtype else self.framework.weight_bytes

    @property
    def used_weight_bytes(self) -> int:
        """Bytes of each number of the weights that a pass reads: as they were gathered if they are sharded, else as the
        framework keeps them."""
        return self.gathered_bytes if self.memory_options.zero else self.framework.weight_bytes

    @property
    def may_shard_gradients(self) -> bool:
        """Whether a search may shard state over all replicas.

        Gradients are then reduce-scattered: at ZeRO level 1 once a step, at levels 2 and 3 in every micro-batch. So the
        search shards only with codecs that send every number; in fp16, which has a loss scale, only with those of them
        that keep no state.
        """
        return self.codec.sharded_sums == "all" and not (self.codec.has_state and self.precision == "fp16")

    def casts_weights(self, sharded: bool) -> bool:
        """Return whether autocast makes a low-precision copy of each weight: in bf16 and fp16, unless weights are
        gathered in that precision already.

        Args:
            sharded: whether weights are sharded over replicas and gathered for use.
        """
        whole_bytes = self.gathered_bytes if sharded else self.framework.weight_bytes
        return self.value_bytes < whole_bytes

    def block_bytes(self, micro_batch: int, tp: int) -> float:
        """Return the bytes that a block keeps for its backward pass without recomputation, on one of `tp` devices.

        In bf16 and fp16 the matrix products keep 2 bytes a value; norms, rotary positions and the residual stream keep
        4. All values count with the mean, 3.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        mean = self._mean_bytes
        whole = float(self.spec.activation_bytes(micro_batch, self.seq_len, tp, mean))
        if self.memory_options.sequence_parallel:
            whole -= self.spec.residual_stream_bytes(micro_batch, self.seq_len, mean) * (1 - 1 / tp)
        return whole

    def selective_bytes(self, micro_batch: int, tp: int) -> float:
        """Return the bytes of a block's activations that selective recomputation computes again, on one of `tp`
        devices.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        return float(self.spec.selective_bytes(micro_batch, self.seq_len, tp, self._mean_bytes))

    def kept_score_bytes(self, micro_batch: int, tp: int) -> float:
        """Return the part of `block_bytes` that attention scores are; 0 with fused attention.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        return float(self.spec.kept_score_bytes(micro_batch, self.seq_len, tp, self._mean_bytes))

    def attention_bytes(self, fused_passes: tuple[float, float], micro_batch: int, tp: int, side: int) -> float:
        """Return the bytes of memory traffic of attention in a pass of a block on one of `tp` devices, without what it
        keeps of queries, keys and values.

        Args:
            fused_passes: (forward, backward) numbers for each product, which stand for the time of fused attention.
            micro_batch: sequences of a micro-batch.
            side: 0 for the forward pass, 1 for the backward pass.
        """
        touched = self.spec.touched_score_bytes(micro_batch, self.seq_len, tp, self.value_bytes)
        if touched is not None:
            return touched[side]
        return fused_passes[side] * self.value_bytes * self.spec.attention_products(micro_batch, self.seq_len) / tp

    @property
    def _mean_bytes(self) -> int:
        """Bytes of an activation's value: the mean over matrix products and the residual stream."""
        return (self.value_bytes + self.framework.residual_stream_bytes) // 2

    def saved_activation_bytes(self, micro_batch: int, tp: int) -> float:
        """Return the bytes that a block keeps from forward to backward on one of `tp` devices, with the workload's
        recomputation.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        if self.memory_options.recompute == "none":
            return self.block_bytes(micro_batch, tp)
        saved = self.hidden_bytes(micro_batch, tp)
        if self.memory_options.recompute == "selective":
            saved += self.spec.matmul_output_bytes(micro_batch, self.seq_len, tp, self.value_bytes)
        return saved

    def stage_boundary_bytes(self, micro_batch: int) -> int:
        """Return the bytes of the residual stream [sequences, seq_len, dim] between two stages, before a codec
        encodes it; fp32 in hpctrain, 2 bytes per value in some other frameworks.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        return self.spec.stage_boundary_bytes(micro_batch, self.seq_len, self.framework.residual_stream_bytes)

    def hidden_bytes(self, micro_batch: int, tp: int) -> float:
        """Return the bytes of a micro-batch's residual stream on one of `tp` devices: all of it, or 1/tp with sequence
        parallelism.

        Args:
            micro_batch: sequences of a micro-batch.
        """
        return self.stage_boundary_bytes(micro_batch) / (tp if self.memory_options.sequence_parallel else 1)

    def message_bytes(self, micro_batch: int, tp: int, messages: Messages) -> float:
        """Return the bytes that one of `tp` devices sends to the next stage, or back to the previous one, for one
        micro-batch.

        Args:
            micro_batch: sequences of a micro-batch.
            messages: codec of the message.
        """
        size = self.hidden_bytes(micro_batch, tp) * MESSAGES[messages].number_bytes / FULL_BYTES
        return size / tp if self.framework.split_sends and not self.memory_options.sequence_parallel else size

    def tensor_parallel_bytes(self, micro_batch: int, in_bf16: bool) -> tuple[float, float]:
        """Return the bytes of the activations that each all-reduce of tensor parallelism sums, as (in the forward pass,
        in the backward pass). The forward pass sums outputs of matrix products, the backward pass gradients of the
        residual stream.

        Args:
            micro_batch: sequences of a micro-batch.
            in_bf16: whether numbers are sent in bf16.
        """
        whole, stream_bytes = float(self.stage_boundary_bytes(micro_batch)), self.framework.residual_stream_bytes
        numbers = whole / stream_bytes
        sizes = (2, 2) if in_bf16 else (min(self.value_bytes, stream_bytes), stream_bytes)
        return numbers * sizes[0], numbers * sizes[1]

    def messages_behind(self, stage: int) -> Messages:
        """Return the codec of messages between a stage and the next one where the two stages lie on different nodes;
        within a node, messages are not encoded."""
        return self.messages if isinstance(self.messages, str) else self.messages[stage]

    def parameters(self, share: ModelPart, tp: int) -> int:
        """Return the number of parameters of a stage on one of `tp` devices.

        Args:
            share: the part of the model that the stage holds.
        """
        key = share, tp
        if key not in self._parameters:
            counted = self.spec.stage_parameters(share.blocks, tp, first=share.first, last=share.last)
            self._parameters[key] = counted
        return self._parameters[key]

    @cached_property
    def _parameters(self) -> dict[tuple[ModelPart, int], int]:
        return {}

    def group_parameters(self, share: ModelPart, tp: int) -> dict[LayerGroup, float]:
        """Return layer group -> number of its parameters in a stage on one of `tp` devices; norms count with the
        matrices beside them.

        Args:
            share: the part of the model that the stage holds.
        """
        ends = self.spec.end_parameters(tp, first=share.first, last=share.last)
        blocks = self.parameters(share, tp) - ends
        attention = self.spec.attention_share * blocks
        return {"embedding_head": ends, "attention": attention, "feed_forward": blocks - attention}

    def least_block_parameters(self, tp: int) -> int:
        """Return the fewest parameters that one more block adds to any stage, on one of `tp` devices."""
        return min(
            self.parameters(ModelPart(1, *ends), tp) - self.parameters(ModelPart(0, *ends), tp) for ends in STAGE_ENDS
        )

    def mean_blocks(self, share: ModelPart) -> tuple[float, float]:
        """Return how many blocks of mean size equal the stage's blocks, as (in compute time, in bytes of kept
        activations).

        Args:
            share: the part of the model that the stage holds.
        """
        return self.spec.mean_blocks(share.blocks, self.seq_len, first=share.first, last=share.last)

    @cached_property
    def least_blocks(self) -> float:
        """The least compute time of all blocks of the model over all cuts, as a number of blocks of mean size.

        The compute time depends on the cut, because the blocks of the first and the last stage may take less time than
        mean blocks.
        """
        layers = self.spec.layers
        return layers + sum(min(self.mean_blocks(share)[0] - share.blocks for share in ends) for ends in self._ends)

    @cached_property
    def least_share(self) -> float:
        """The least time of a block in any stage, as a share of the time of a block of mean size."""
        return min(1.0, *(self.mean_blocks(share)[0] / share.blocks for ends in self._ends for share in ends[1:]))

    @cached_property
    def _ends(self) -> tuple[list[ModelPart], list[ModelPart]]:
        """All parts of the model that a first stage can hold, and all parts that a last stage can hold."""
        numbers = range(self.spec.layers + 1)
        return [ModelPart(number, True, False) for number in numbers], [
            ModelPart(number, False, True) for number in numbers
        ]

    def micro_batch_sizes(self) -> list[int]:
        """Return the micro-batch sizes to try, in sequences. They divide the global batch, so that all micro-batches
        have one size.

        Raises:
            InputError: the size fixed in the run file does not divide the global batch.
        """
        sizes = list(_divisors(self.sequences))
        if self.fixed is None or self.fixed.micro_batch is None:
            return sizes
        if self.fixed.micro_batch not in sizes:
            raise InputError(
                f"parallel.micro_batch: found {self.fixed.micro_batch}, batch.global {self.sequences} is not a "
                f"multiple of it; allowed: {', '.join(map(str, sizes))}"
            )
        return [self.fixed.micro_batch]

    def schedule_specs(self, pp: int) -> list[ScheduleSpec]:
        """Return the schedules to try with `pp` pipeline ranks, each with its number of virtual stages. If the run file
        fixes the schedule's name, only schedules of this name are returned, at least one.
        """
        if self.fixed is not None and self.fixed.schedule is not None:
            given = [schedule_spec for schedule_spec in SCHEDULE_SPECS if schedule_spec.name == self.fixed.schedule]
            return [
                schedule_spec for schedule_spec in given if self.spec.layers >= schedule_spec.virtual_stages * pp
            ] or given[:1]
        if pp == 1:
            return [ScheduleSpec("1f1b")]  # forwards and backwards of one stage take the same time in any order
        whole = self.compiled or self.memory_options.recompute != "none" or not self.spec.can_split_backward
        return [
            schedule_spec
            for schedule_spec in SCHEDULE_SPECS
            if self.spec.layers >= schedule_spec.virtual_stages * pp
            and not (whole and schedule_spec.name in SPLIT_BACKWARD_SCHEDULES)
        ]


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def workload_of(run: Run, spec: Spec) -> tuple[Workload, list[str]]:
    """Return the workload of a run file, and notes on keys of the run file that do not apply.

    Raises:
        InputError: the vocabulary size is not known yet, the fixed micro-batch size does not divide the global batch,
            or two keys of `parallel` cannot be combined.
    """
    if spec.vocab is None:
        raise InputError(
            "model.vocab: not settled; give model.dims.vocab, or prepare the data with `hpctrain data prepare`"
        )
    fixed = run.parallel if isinstance(run.parallel, FixedParallel) else None
    memory_options, notes = memory_options_of_run(run)
    asked = run.compression
    codec = (
        NoCompression()
        if isinstance(asked, AutoCompression)
        else asked.model_copy(update={"activations": None, "intra_node": None, "tensor_parallel": None})
    )
    if isinstance(codec, PowerSgd):
        codec = codec.for_run(run.optimizer.first_steps(run.steps))
    work = Workload(
        spec, run.batch.global_, run.data.seq_len, run.precision, fixed, memory_options, run.compile, codec=codec,
        intra_node="flat" if asked.node_sums == "auto" else asked.node_sums,
        tensor_parallel_sums="none" if asked.tensor_sums == "auto" else asked.tensor_sums,
        messages="none" if asked.messages == "auto" else asked.messages,
        state_outlives=run.recovery.memory == "auto", snapshots=run.recovery.snapshot_every != "off",
    )  # fmt: skip
    work.micro_batch_sizes()
    return work, notes
