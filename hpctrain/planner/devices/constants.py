"""Constants of the cost model, by kind of device and by framework: counts of operations and bytes, never speeds.

A part of a stage takes flops / (efficiency · speed) + bytes touched / bandwidth on the device, and operations · launch
time on the host. The probe measures the speeds on each device. On a CPU, device time and host time add up, because an
operation is done when its call returns. On CUDA the host runs ahead, so the longer one of device time and host time
dominates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.topology.topology import CodecSeconds

ForwardBackward = tuple[float, float]
"""A figure of the forward pass and the same figure of the backward pass: (forward, backward)."""


class UpdateCost(NamedTuple):
    """Costs of a step's update: AdamW, the gradient's norm and clipping."""

    touched_bytes: float
    """Bytes touched per parameter."""
    ops: float
    """Tiny operations per tensor, each of which takes the device's launch time."""

    def scaled(self, factor: float) -> UpdateCost:
        """Return the costs with `touched_bytes` and `ops` multiplied by `factor`."""
        return UpdateCost(factor * self.touched_bytes, factor * self.ops)


class CollectiveCost(NamedTuple):
    """Costs of an all-gather or a reduce-scatter of ZeRO, without its messages."""

    passes: float
    """Number of reads and writes of all its bytes: the copies to and from flat buffers, and the sum of what arrives."""
    ops: float
    """Tiny operations that the host starts."""


@dataclass(frozen=True)
class CostConstants:
    """Constants of one kind of device. An "operation" is a tiny one, which takes the device's measured launch time."""

    overlap_power: float
    """Exponent p in (device^p + host^p)^(1/p), the time of a pass.

    It is 1 if a call returns when its operation is done. It is large if the host runs ahead, so that only the longer of
    the two times counts.
    """
    efficiency: float
    """Share of the device's sustained FLOP/s that a block's matrix products reach; all other losses are modelled as
    bytes. The head is one large product, as a probe measures them, and reaches all of it.
    """
    half_width: float
    """Hidden size per device (dim / tp) at which a block's matrix products reach half of `efficiency`.

    Narrow matrices do not fill a GPU.
    """
    block_ops: ForwardBackward
    """Operations of a block's forward and backward; each module call counts as several."""
    tensor_parallel_ops: ForwardBackward
    """Operations of the host to dispatch a block's tensors that tensor parallelism splits."""
    hierarchical_all_reduce: bool
    """Whether tensor-parallel all-reduces may go node by node (see `ring_all_reduce_s`). Data-parallel all-reduces
    always count as one ring, as in the bounds of the search.
    """
    collective_ops: float
    """Operations added to each hop of a tensor-parallel all-reduce: its start, and the wait for other ranks to
    start.
    """
    wait_ops: float
    """Operations that take as long as a rank waits, at a tensor-parallel all-reduce or an all-gather of weights, until
    the last rank has arrived there. On a CPU fitted to the residual of whole steps, so it holds whatever else the cost
    model misses there.
    """
    sent_byte_passes: float
    """Processor time to send a byte of a collective and to receive another one, as the bytes of memory traffic that
    take equally long; 0 if processors do not handle messages.
    """
    activation_passes: ForwardBackward
    """Number of reads and writes of a block's kept activations outside of its matrix products."""
    attention_passes: ForwardBackward
    """Time of fused attention beside its FLOPs, as if so many numbers were read or written in memory for each product
    of a query's and a key's number. The numbers stay on the chip, but these products reach a smaller rate than other
    matrix products.
    """
    weight_passes: ForwardBackward
    """Number of reads and writes of the weights in a micro-batch; backward includes the sum into the gradient."""
    logits_passes: ForwardBackward
    """Number of reads and writes of the logits and of the values that the loss keeps."""
    embedding_passes: ForwardBackward
    """Number of reads and writes of the embedding. Forward reads one row a token, which is negligible; backward makes a
    whole gradient and adds it up.
    """
    embedding_ops: ForwardBackward
    """Operations of the embedding."""
    head_ops: ForwardBackward
    """Operations of the last norm, the head and the loss."""
    action_ops: float
    """Operations that the schedule's executor adds to each forward or backward of a stage."""
    optimizer: UpdateCost
    """The update of parameters that neither sharding nor tensor parallelism splits."""
    sharded_optimizer: UpdateCost
    """The update of sharded state, for which torch uses another implementation of AdamW."""
    split_optimizer: UpdateCost
    """The update of parameters that tensor parallelism splits."""
    shard_ops: ForwardBackward
    """Operations that `fully_shard` adds to a block, without its collectives."""
    all_gather: CollectiveCost
    """An all-gather of the weights of a block, or of the part outside of blocks."""
    reduce_scatter: CollectiveCost
    """A reduce-scatter of the gradients of a block, or of the part outside of blocks."""
    recompute_ops: ForwardBackward
    """Operations that activation checkpointing itself adds to a block."""
    split_ops: float
    """Operations that splitting a block's backward into I and W adds."""
    split_passes: float
    """Additional reads and writes of a block's kept activations with a split backward."""
    inputs_share: float
    """Share of the time of a split backward (I and W together) that the backward for inputs (I) takes."""
    reducer_bytes: float
    """Bytes touched per parameter to gather gradients into flat buckets and to copy the sums back."""
    step_ops: float
    """Operations that run once a step: zeroing gradients, reading the loss, the learning-rate scheduler."""


CPU_CONSTANTS = CostConstants(
    # Passes: fitted to CPU seconds of hpctrain's decoder on one core (dim 128 to 512, 128 to 1024 tokens; 104 GFLOP/s,
    # 0.95 us an operation, 19.8 GB/s while another core copies, too; docs/results/planner.md, "Constants of CPUs").
    overlap_power=1.0,
    efficiency=1.0,
    half_width=0.0,
    block_ops=(530.0, 350.0),
    tensor_parallel_ops=(3700.0, 5900.0),  # measured: CPU seconds of DTensor between two workers
    hierarchical_all_reduce=False,  # gloo has one ring through all ranks
    collective_ops=0.0,  # included in the links' measured alpha
    # Fitted by eye to what the bench's own steps with ZeRO 3 and tp 2 take beyond all other terms; not measured alone.
    wait_ops=3000.0,
    # Measured: 5 to 15 by collective, CPU seconds of two and four processes, 8 MB, gloo over loopback, at 20 GB/s.
    sent_byte_passes=10.0,
    activation_passes=(5.0, 6.0),
    attention_passes=(0.0, 0.0),  # included in activation_passes, at up to 1024 tokens
    weight_passes=(1.5, 4.0),
    logits_passes=(1.5, 3.0),
    embedding_passes=(0.0, 4.0),
    embedding_ops=(12.0, 25.0),
    head_ops=(100.0, 150.0),
    action_ops=250.0,
    optimizer=UpdateCost(touched_bytes=37.0, ops=8.0),  # bytes: fused AdamW 22, gradient norm 9, clipping 6
    sharded_optimizer=UpdateCost(touched_bytes=37.0, ops=70.0),  # the same kernels, on DTensors
    split_optimizer=UpdateCost(touched_bytes=85.0, ops=110.0),  # AdamW tensor by tensor
    shard_ops=(510.0, 440.0),  # measured: CPU seconds of the hooks of `fully_shard`
    all_gather=CollectiveCost(passes=4.0, ops=500.0),
    reduce_scatter=CollectiveCost(passes=7.0, ops=450.0),
    recompute_ops=(340.0, 670.0),
    split_ops=1000.0,
    split_passes=3.0,  # adds 9 % to the backward at dim 512, 27 % at 256
    inputs_share=0.55,  # at dim 512 and at 256
    reducer_bytes=16.0,
    step_ops=2000.0,  # measured: CPU seconds of a step's metrics and bookkeeping
)
"""Constants of a CPU, measured with torch 2.13."""

CUDA_CONSTANTS = CostConstants(
    # `python -m tools.published_runs` fits the values marked "fitted" to published runs of Megatron on A100s (vTrain,
    # MICRO 2024), and reports their error on other runs. The other values are assumptions: the CPU's values, with a
    # kernel launch counted as 6 to 7 tiny CPU operations.
    overlap_power=3.22,  # fitted
    efficiency=0.818,  # fitted: share of the speed of large matrix products alone, as a probe measures it
    half_width=30.0,  # fitted
    block_ops=(140.5, 224.8),  # fitted
    tensor_parallel_ops=(345.0, 555.0),
    hierarchical_all_reduce=True,
    collective_ops=0.906,  # fitted
    wait_ops=0.0,  # included in collective_ops
    sent_byte_passes=0.0,  # GPUs and network cards carry messages
    activation_passes=(1.94, 3.88),  # fitted
    attention_passes=(0.0263, 0.0526),  # fitted to fully sharded runs of llm-foundry
    weight_passes=(1.52, 3.04),  # fitted
    logits_passes=(2.27, 4.54),  # fitted
    embedding_passes=(0.0, 4.0),
    embedding_ops=(1.8, 3.8),
    head_ops=(15.0, 22.0),
    action_ops=52.6,  # fitted
    optimizer=UpdateCost(touched_bytes=110.0, ops=9.0),
    sharded_optimizer=UpdateCost(touched_bytes=110.0, ops=25.0),
    split_optimizer=UpdateCost(touched_bytes=140.0, ops=30.0),
    shard_ops=(75.0, 105.0),  # including the start of collectives
    all_gather=CollectiveCost(passes=2.0, ops=0.0),
    reduce_scatter=CollectiveCost(passes=2.0, ops=0.0),
    recompute_ops=(51.0, 100.0),
    split_ops=150.0,
    split_passes=3.0,
    inputs_share=0.55,
    reducer_bytes=16.0,
    step_ops=60.8,  # fitted
)

DEFAULT_CODEC_S = {
    # From whole reductions of four gloo processes on loopback (docs/results/compression.md, single measurements), and
    # from timings of the steps of bf16 and of 4-bit integers, with torch 2.13.
    "cpu": CodecSeconds(bf16=2.6e-9, quantized=7e-9, topk=11e-9, power_sgd=5.9e-9, rotated=8.8e-9),
    # An assumption, not measured: as many passes over memory as on a CPU, at 50 times the bandwidth.
    "cuda": CodecSeconds(bf16=0.05e-9, quantized=0.14e-9, topk=0.22e-9, power_sgd=0.12e-9, rotated=0.18e-9),
}
"""Kind of device -> seconds per number with each codec, for devices on which the codecs were not measured."""

COST_CONSTANTS = {"cpu": CPU_CONSTANTS, "cuda": CUDA_CONSTANTS}
"""Kind of device -> constants of the cost model."""


@dataclass(frozen=True)
class Framework:
    """What the cost model needs to know of a training framework: how many bytes it uses for a number, how it sends
    activations between stages, and what it repeats or copies.
    """

    weight_bytes: int = 4
    """Bytes per parameter of the weights in training."""
    gradient_bytes: int = 4
    """Bytes per parameter of the gradients."""
    state_bytes: int = 8
    """Bytes per parameter of AdamW's two moments, and of a master copy if weights are in half precision."""
    accumulated_bytes: int = 0
    """Bytes per parameter of a copy of all gradients, never sharded, in which those of the micro-batches are added up;
    0 where they are added up in the gradients themselves."""
    checkpoint_bytes: int = 12
    """Bytes per parameter of the copy of weights and moments while a checkpoint is written during training."""
    shards_in_place: bool = False
    """Whether ZeRO 1 shards one flat tensor in place, as DeepSpeed does: a rank's parts of weights and gradients are
    views of the whole ones, and gradients are summed in a bucket. If False, these parts are tensors of their own, and
    gradients are summed by piece (a block, or the part outside of blocks), as by `fully_shard`."""
    sharded_sum_factor: float = 1.0
    """Bytes that a rank sends to sum gradients with ZeRO, divided by those of a reduce-scatter."""
    gather_buffer_bytes: int = 0
    """Bytes per parameter of the buffer in which ranks gather all updated weights at once, if `shards_in_place`; 0
    where they gather a bucket at a time."""
    shard_prefetch: bool = True
    """Whether ZeRO's collectives of one block overlap the computation of other blocks: on CUDA all of them, on a CPU
    the reduce-scatters."""
    bucket_bytes: float = BUCKET_BYTES
    """Bytes of the largest bucket of gradients that is summed at once between replicas."""
    early_sums: bool = True
    """Whether a stage's gradients are summed while the pipeline goes on with other stages; if False, sums overlap the
    backward only where a replica is one stage."""
    residual_stream_bytes: int = 4
    """Bytes per value of the residual stream, which is also sent between stages."""
    blocking_sends: bool = False
    """Whether a rank waits while it sends between stages; if False, sends overlap its computation."""
    split_sends: bool = False
    """Whether each device of a tensor-parallel group sends a part of the activation; if False, each sends the whole."""
    split_streams: int = 5
    """Number of additional copies of the residual stream that a block keeps for its backward pass with tensor
    parallelism.

    DTensor's all-reduces make them; counted on CPU with tp 2 at two widths (torch 2.13).
    """
    split_outputs: bool = False
    """Whether a device keeps 1/tp of the output that its stage sends, as DeepSpeed does, and restores the whole output
    for the backward pass. The input of a stage is then counted as that of its first block, and a recomputed block
    once, because its backward pass frees activations while it makes gradients. If False, a stage keeps its input and
    its output, and the backward pass of a recomputed block takes the block's activations twice."""
    gap_share: float = 0.0
    """Bytes in the gaps of torch's CUDA allocator, divided by those of the tensors that come and go within a step:
    activations, and gradients of blocks. State, buffers and the gradient of an embedding fill segments of their own
    and leave no gaps. 0 where gaps are not counted."""
    process_bytes: float | None = None
    """Bytes of a worker process beyond all counted tensors; None: those of hpctrain's worker (`PROCESS_BYTES`)."""
    selective_sends_again: bool = True
    """Whether selective recomputation repeats the tensor-parallel all-reduces in the backward pass."""

    @property
    def summed_bytes(self) -> int:
        """Bytes per parameter of the gradients that replicas sum: those of `accumulated_bytes` where there is such a
        copy, else `gradient_bytes`."""
        return self.accumulated_bytes or self.gradient_bytes

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per parameter of weights, gradients, optimizer state and the copy for a checkpoint, together."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes + self.checkpoint_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes per parameter of the tensors that ZeRO shards."""
        views = self.weight_bytes + self.gradient_bytes if self.shards_in_place else 0
        return self.bytes_per_parameter - views


HPCTRAIN_FRAMEWORK = Framework()
"""hpctrain's runtime: fp32 weights and gradients, autocast, sends in the background."""
