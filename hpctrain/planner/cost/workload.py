"""What has to be computed in a step, and what the run file fixes about how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions, memory_options_of_run
from hpctrain.planner.devices.framework import HPCTRAIN_FRAMEWORK, Framework
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.codec import FULL_BYTES, has_state, message_bytes_per_element
from hpctrain.records.plan.compression import AutoCompression, Codec, Messages, NoCompression, Quantized
from hpctrain.records.run.run import FixedParallel, Run
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

NO_CODEC = NoCompression()
USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory that a plan may fill (the paper, section 3.4); the rest is the allocator's."""


STAGE_ENDS = ((False, False), (True, False), (False, True))
"""Whether a stage of several has the model's first part, and its last one."""


class ScheduleSpec(NamedTuple):
    """A schedule and how many stages it has on each pipeline rank."""

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
"""In order of preference where they are equally fast: the first keeps the fewest activations."""
FEWEST_ACTIVATIONS = SCHEDULE_SPECS[0]
"""No rank of another keeps fewer micro-batches in any of its stages at its fullest moment. A V-shaped one may fit where
this does not, for its first and its last stage share a rank."""


class ModelPart(NamedTuple):
    """The part of the model that a stage holds."""

    blocks: int
    first: bool
    """With the embedding."""
    last: bool
    """With the last norm and the head."""


@dataclass(frozen=True)
class Workload:
    """A step of training."""

    spec: Spec
    sequences: int
    """Sequences in a step over the whole job."""
    seq_len: int
    precision: str
    fixed: FixedParallel | None = None
    """Degrees given by hand."""
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS
    """What is done to save memory."""
    compiled: bool = False
    """Whether blocks are compiled; they cannot be split over devices, nor their backward into inputs and weights."""
    framework: Framework = HPCTRAIN_FRAMEWORK
    """Who trains."""
    codec: Codec = NO_CODEC
    """How gradients are summed over replicas."""
    messages: Messages | tuple[Messages, ...] = "none"
    """How messages to the next stage, and from it, travel between nodes: all in one way, or by stage."""
    usable: float = USABLE_MEMORY_SHARE
    """Share of a device's memory that a plan may fill."""

    @property
    def value_bytes(self) -> int:
        """Bytes of what matrix products give and take."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a weight as sharding gathers it: 2 in bf16 and fp16 where it is cast before, else 4."""
        return self.value_bytes if self.spec.gathers_in_compute_dtype else self.framework.weight_bytes

    @property
    def may_shard_gradients(self) -> bool:
        """Whether a search may shard over all replicas: gradients are then summed into parts in the backward pass,
        by what keeps nothing or, where there is no loss scale, by integers."""
        return not has_state(self.codec) or (isinstance(self.codec, Quantized) and self.precision != "fp16")

    def casts_weights(self, sharded: bool) -> bool:
        """Whether autocast makes a cast copy of each weight: in bf16 and fp16, unless it was gathered as one."""
        whole_bytes = self.gathered_bytes if sharded else self.framework.weight_bytes
        return self.value_bytes < whole_bytes

    def block_bytes(self, micro_batch: int, tp: int) -> float:
        """What a block keeps for its backward pass when nothing is computed again.

        In bf16 and fp16 the matrix products keep 2 bytes a value, while norms, rotary positions and the residual stream
        stay in fp32: 3 is the mean.
        """
        mean = self._mean_bytes
        whole = float(self.spec.activation_bytes(micro_batch, self.seq_len, tp, mean))
        if self.memory_options.sequence_parallel:
            whole -= self.spec.residual_stream_bytes(micro_batch, self.seq_len, mean) * (1 - 1 / tp)
        return whole

    def selective_bytes(self, micro_batch: int, tp: int) -> float:
        """What selective recomputation makes again of a block."""
        return float(self.spec.selective_bytes(micro_batch, self.seq_len, tp, self._mean_bytes))

    @property
    def _mean_bytes(self) -> int:
        """Of an activation's value, between those of matrix products and those of the stream."""
        return (self.value_bytes + self.framework.residual_stream_bytes) // 2

    def saved_activation_bytes(self, micro_batch: int, tp: int) -> float:
        """What a block keeps from its forward to its backward pass: with recomputation, less than `block_bytes`."""
        if self.memory_options.recompute == "none":
            return self.block_bytes(micro_batch, tp)
        kept = self.hidden_bytes(micro_batch, tp)
        if self.memory_options.recompute == "selective":
            kept += self.spec.matmul_output_bytes(micro_batch, self.seq_len, tp, self.value_bytes)
        return kept

    def stage_boundary_bytes(self, micro_batch: int) -> int:
        """The residual stream [rows, seq, dim] between two stages; ours is in fp32 at any precision."""
        return self.spec.stage_boundary_bytes(micro_batch, self.seq_len, self.framework.residual_stream_bytes)

    def hidden_bytes(self, micro_batch: int, tp: int) -> float:
        """The part of the residual stream on one of `tp` devices: all of it, or its part of the sequence."""
        return self.stage_boundary_bytes(micro_batch) / (tp if self.memory_options.sequence_parallel else 1)

    def message_bytes(self, micro_batch: int, tp: int, messages: Messages) -> float:
        """What one of `tp` devices sends to the next stage, or back."""
        size = self.hidden_bytes(micro_batch, tp) * message_bytes_per_element(messages) / FULL_BYTES
        return size / tp if self.framework.split_sends and not self.memory_options.sequence_parallel else size

    def messages_behind(self, stage: int) -> Messages:
        """How messages between a stage and the next one travel where they lie on different nodes."""
        return self.messages if isinstance(self.messages, str) else self.messages[stage]

    def head_shards(self, tp: int) -> int:
        """Parts that embedding and head are cut into."""
        return self.spec.head_shards(tp)

    def parameters(self, share: ModelPart, tp: int) -> int:
        """Parameters of a stage on one of `tp` devices."""
        return self.spec.stage_parameters(share.blocks, tp, first=share.first, last=share.last)

    def least_block_parameters(self, tp: int) -> int:
        """Parameters that a further block adds to a stage on one of `tp` devices at least."""
        return min(
            self.parameters(ModelPart(1, *ends), tp) - self.parameters(ModelPart(0, *ends), tp) for ends in STAGE_ENDS
        )

    def mean_blocks(self, share: ModelPart) -> tuple[float, float]:
        """How many blocks of mean size a stage amounts to: in time, and in what it keeps for the backward pass."""
        return self.spec.mean_blocks(share.blocks, self.seq_len, first=share.first, last=share.last)

    @cached_property
    def least_blocks(self) -> float:
        """Blocks of mean size that the model amounts to at least, however it is cut: its ends may have smaller ones."""
        layers = self.spec.layers
        return layers + sum(min(self.mean_blocks(share)[0] - share.blocks for share in each) for each in self._ends)

    @cached_property
    def least_share(self) -> float:
        """What one of a stage's blocks counts as at least, in blocks of mean size."""
        return min(1.0, *(self.mean_blocks(share)[0] / share.blocks for each in self._ends for share in each[1:]))

    @cached_property
    def _ends(self) -> tuple[list[ModelPart], list[ModelPart]]:
        """First and last stages of any number of blocks."""
        numbers = range(self.spec.layers + 1)
        return [ModelPart(number, True, False) for number in numbers], [
            ModelPart(number, False, True) for number in numbers
        ]

    def micro_batch_sizes(self) -> list[int]:
        """Sizes to try: those that divide the batch, so that every micro-batch is equally long.

        Raises:
            InputError: the size given by hand does not.
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
        """Schedules to try with `pp` pipeline ranks."""
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
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def workload_of(run: Run, spec: Spec) -> tuple[Workload, list[str]]:
    """The step that a run file asks for, and notes on what of it does not apply.

    Raises:
        InputError: the vocabulary is still open, the micro-batch by hand does not divide the batch, or two keys of
            `parallel` do not go together.
    """
    if spec.vocab is None:
        raise InputError(
            "model.vocab: not settled; give model.dims.vocab, or prepare the data with `hpctrain data prepare`"
        )
    fixed = run.parallel if isinstance(run.parallel, FixedParallel) else None
    memory_options, notes = memory_options_of_run(run)
    asked = run.compression
    codec = NoCompression() if isinstance(asked, AutoCompression) else asked.model_copy(update={"activations": None})
    work = Workload(
        spec, run.batch.global_, run.data.seq_len, run.precision, fixed, memory_options, run.compile, codec=codec,
        messages="none" if asked.messages == "auto" else asked.messages,
    )  # fmt: skip
    work.micro_batch_sizes()
    return work, notes
