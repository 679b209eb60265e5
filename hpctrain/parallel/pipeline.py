"""Runs the pipeline of a plan with torch's schedule executor, from an action table without sends and receives, which
torch adds.

This file and `action_table` use private names of torch.distributed.pipelining: `_PipelineScheduleRuntime`, `_Action`,
`_ComputationType` and `_batch_p2p`. The stage overrides three more: `_get_init_p2p_neighbors_ops`,
`_prepare_forward_infra` and `_prepare_backward_infra`. All were checked for torch 2.11 to 2.14. Every plan runs through
this executor, also with pp = 1, so that there is one code path.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _batch_p2p, _PipelineScheduleRuntime
from torch.distributed.tensor.parallel import loss_parallel

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.module_argv import set_safe_path
from hpctrain.compress.collectives.sums_in_flight import SumsInFlight
from hpctrain.model.build import Fill, build_part
from hpctrain.model.imported.model import blocks_of
from hpctrain.model.layers import StageBlocks
from hpctrain.parallel.action_table import (
    ActionTable,
    actions_by_group_rank,
    early_receives,
    forward_only,
    micro_batches_in_flight,
    place_unshards,
)
from hpctrain.parallel.fsdp import ShardedStage, apply_sharding
from hpctrain.parallel.gradients import TiedWeights, tie_weights
from hpctrain.parallel.loss import LossScaler, make_loss
from hpctrain.parallel.mesh import Coordinate, sharding_mesh
from hpctrain.parallel.recompute import recompute_blocks
from hpctrain.parallel.stage import (
    InstrumentedStage,
    Mark,
    RandomStream,
    StageCounters,
    mark,
    seconds_between,
)
from hpctrain.parallel.tensor_parallel import apply_tensor_parallel, vocabulary_is_split
from hpctrain.parallel.tensor_sums import LevelSums, build_level_sums
from hpctrain.parallel.tracked_work import TrackedReceives
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.model.span_corruption import Lengths
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Schedule
from hpctrain.records.run.objective import NEXT_TOKEN, AnyObjective, lengths


@dataclass(frozen=True)
class PipelineInputs:
    """The arguments of `build_pipeline`, except the mesh and the rank's coordinate."""

    plan: Plan
    spec: Spec
    """The model."""
    schedule: Schedule
    """The action table of this rank's replica."""
    seq_len: int
    """Tokens of a sequence: `data.seq_len` of the run file."""
    seed: int
    """The run's seed, for initial weights and dropout."""
    device: torch.device
    """Device of this rank."""
    autocast: torch.dtype | None = None
    """Dtype of matrix products: bfloat16 or float16; None: fp32 throughout."""
    scaler: LossScaler | None = None
    """The loss scale; None unless matrix products are in float16."""
    compile: bool = False
    """Whether blocks are compiled; compilation happens at their first call."""
    timeout: timedelta | None = None
    """How long a rank waits for another rank in one operation; None: torch's defaults."""
    objective: AnyObjective = NEXT_TOKEN
    """What the model learns; it decides the token counts of a sample (`lengths`)."""
    fill: Fill | None = None
    """Function that sets a stage's initial weights, read from a folder; None: they come from the seed, or from the
    user's factory."""

    @property
    def lengths(self) -> Lengths:
        """Return the counts of tokens, outputs and targets of one sample."""
        return lengths(self.objective, self.seq_len)

    @property
    def message_timeout(self) -> timedelta | None:
        """Return how long to wait for a stage message; None on CUDA, where NCCL's watchdog enforces the process group's
        timeout."""
        return self.timeout if self.device.type == "cpu" else None


class Pipeline:
    """The stages that this rank holds and the schedule that runs them."""

    def __init__(
        self,
        inputs: PipelineInputs,
        replica: int,
        stages: list[InstrumentedStage],
        runtime: _PipelineScheduleRuntime,
        tied: TiedWeights,
        in_flight: SumsInFlight,
    ) -> None:
        self.stages = stages
        self.random = RandomStream(inputs.seed, replica, inputs.device)
        for stage in stages:
            stage.random = self.random
        self.sequences = inputs.plan.replicas[replica].sequences
        """Number of sequences of this replica in a step."""
        self.first = any(stage.is_first for stage in stages)
        self.last = any(stage.is_last for stage in stages)
        self._span: tuple[Mark, Mark] = (0.0, 0.0)
        self._runtime = runtime
        self._training: ActionTable = runtime.pipeline_order_with_comms
        self._evaluation = forward_only(self._training)
        self._split_loss = vocabulary_is_split(inputs.spec, inputs.plan.tp)
        self._tied = tied
        self._in_flight = in_flight
        self._scaler = inputs.scaler

    def step(self, tokens: Tensor, targets: Tensor, decoder_tokens: Tensor | None = None) -> Tensor:
        """Run forward and backward on this replica's share of a global batch.

        The gradients stay in the parameters. They are not reduced over replicas, and are multiplied by the loss scale
        if there is one.

        Args:
            tokens: [sequences, seq], of this replica.
            targets: [sequences, outputs], -100 for no target; `outputs` is seq, or the length of the decoder's input.
            decoder_tokens: [sequences, outputs], the decoder's input in an encoder-decoder, None in other models; each
                stage gets the part of the current micro-batch as an argument of the name `decoder_tokens`.

        Returns:
            This replica's share of the global batch's mean loss, a number on the device: the loss in nats summed over
            the replica's targets, divided by the targets of the global batch. 0 on ranks without the last stage.
            To read the number is to wait for the GPU, and so for any rank that the GPU waits for.

        Raises:
            ValueError: the number of sequences is not the replica's, or the targets have another shape.
            RuntimeError: a stage message or a collective failed, or took longer than its timeout.
        """
        start = mark(self.device)
        with self._in_flight:
            loss = self._run(tokens, targets, decoder_tokens, train=True)
            self._span = start, mark(self.device)
        self._tied.add_local_gradients()
        return loss

    def all_reduce_tied_gradients(self) -> None:
        """Sum the gradients of weights that several stages hold, over the pipeline ranks with these stages.

        Call it after the reduction over replicas and before anything reads the gradients.
        """
        if self._tied:
            with ACTIVITY.doing("sum the gradients of weights in several stages", waits="pp"):
                self.stages[0].counters.sent_bytes += self._tied.all_reduce_gradients()

    def evaluate(self, tokens: Tensor, targets: Tensor, decoder_tokens: Tensor | None = None) -> float:
        """Return this replica's share of the global batch's mean loss, from a forward pass with the modules in
        evaluation mode. Arguments and errors are those of `Pipeline.step`; the call waits for the GPU."""
        for stage in self.stages:
            stage.submod.eval()
        try:
            return self.replay_forward(tokens, targets, decoder_tokens)
        finally:
            for stage in self.stages:
                stage.submod.train()

    @torch.no_grad()
    def replay_forward(self, tokens: Tensor, targets: Tensor, decoder_tokens: Tensor | None = None) -> float:
        """Return this replica's share of the global batch's mean loss, from a forward pass in the current mode of the
        modules.

        Arguments and errors are those of `Pipeline.step`; the call waits for the GPU. In training mode, dropout draws
        the random numbers that `Pipeline.step` draws with the same `random.step`.
        """
        with ACTIVITY.doing("wait for the loss", waits="device" if self.device.type == "cuda" else None):
            return float(self._run(tokens, targets, decoder_tokens, train=False))

    @property
    def step_s(self) -> float:
        """Return the seconds of the last training step's schedule on this rank. On CUDA, wait until it has ended."""
        return seconds_between(*self._span)

    @property
    def device(self) -> torch.device:
        return self.stages[0].device

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of each parameter of this rank, each name once. Names do not depend on how the model
        is cut."""
        followers = {id(copy) for copy in self._tied.followers}
        named = [item for stage in self.stages for item in stage.submod.named_parameters()]
        return [(name, parameter) for name, parameter in named if id(parameter) not in followers]

    def gradients_of_units(self) -> dict[int, list[list[int]]]:
        """Return stage -> for each of its units, in the order in which their gradients are complete, indices of the
        unit's parameters in the list that `parameters` returns. A unit is a stage or, if the state is sharded, a
        `fully_shard` module. A gradient to which other stages' copies of the weight are added is in no list."""
        index_of = {parameter: index for index, (_, parameter) in enumerate(self.parameters())}
        for leader in self._tied.leaders:
            del index_of[leader]
        return {
            stage.stage_index: [
                [index_of[weight] for weight in unit if weight in index_of] for unit in stage.parameters_of_units()
            ]
            for stage in self.stages
        }

    def tied_holders(self) -> dict[nn.Parameter, int]:
        """Return parameter -> number of pipeline ranks that hold it, for this rank's parameters that several ranks
        hold."""
        return self._tied.holders()

    def layers(self) -> list[int]:
        """Return the blocks that this rank holds, as their numbers in the whole model, ascending."""
        return sorted(number for stage in self.stages for number in blocks_of(stage.submod))

    def take_counters(self) -> dict[int, StageCounters]:
        """Return stage number -> counters of the stage since the last call."""
        return {stage.stage_index: stage.take_counters() for stage in self.stages}

    def _run(self, tokens: Tensor, targets: Tensor, decoder_tokens: Tensor | None, train: bool) -> Tensor:
        # gloo accepts a message shorter than the buffer without an error, so a wrong shape must be found before it is
        # sent.
        outputs = tokens if decoder_tokens is None else decoder_tokens
        if tokens.shape[0] != self.sequences or targets.shape != outputs.shape:
            raise ValueError(
                f"tokens are {tuple(tokens.shape)} and targets {tuple(targets.shape)}, expected {self.sequences} "
                f"sequences and targets of shape {tuple(outputs.shape)}"
            )
        named: dict[str, Any] = {} if decoder_tokens is None else {"decoder_tokens": decoder_tokens}
        self._tied.update_followers()
        losses: list[Tensor] = []
        # torch's evaluation also visits the backward actions, and fails if two neighbouring stages share a rank. So
        # evaluation gets a table without backward actions.
        self._runtime.pipeline_order_with_comms = self._training if train else self._evaluation
        call = self._runtime.step if train else self._runtime.eval
        with loss_parallel() if self._split_loss else contextlib.nullcontext():
            call(
                *([tokens.contiguous()] if self.first else []),  # torch 2.11 refuses other strides than it was told
                target=targets if self.last else None,
                losses=losses,
                return_outputs=False,
                **named,
            )
        for stage in self.stages:
            stage.finish_sends()
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        return total / self._scaler.state.value if self._scaler is not None else total


def build_pipeline(inputs: PipelineInputs, mesh: DeviceMesh, coordinate: Coordinate) -> Pipeline:
    """Return this rank's pipeline. Collective over the world.

    Its parts are built in a fixed order: seeded plain stage, tensor parallelism, recomputation, compilation, sharding,
    pipeline stage, schedule.

    Raises:
        InputError: the user's factory or transformers fails, or builds another model than the spec's.
    """
    plan, owner = inputs.plan, inputs.plan.stage_owner()
    sums, in_flight = build_level_sums(plan, mesh, inputs.timeout), SumsInFlight()
    stages = [
        _build_stage(inputs, mesh, index, coordinate.dp, sums, in_flight)
        for index in range(len(plan.stages))
        if owner[index] == coordinate.pp
    ]
    vocabulary_mesh = mesh["tp"] if vocabulary_is_split(inputs.spec, plan.tp) else None
    loss = make_loss(plan.sequences * inputs.lengths.targets, vocabulary_mesh)
    if inputs.scaler is not None:
        loss = inputs.scaler.scaled(loss)
    if stages[-1].is_last:
        loss = stages[-1].timed(loss)
    micro_batches = plan.replicas[coordinate.dp].micro_batches
    runtime = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, scale_grads=False)
    runtime._prepare_schedule_with_comms(actions_by_group_rank(plan, inputs.schedule, mesh, coordinate))
    place_unshards(runtime, plan.zero, [stage.stage_index for stage in stages])
    if inputs.device.type == "cpu":
        runtime.pipeline_order_with_comms = early_receives(runtime.pipeline_order_with_comms)
    members = runtime.stage_index_to_group_rank
    owners = [dist.get_global_rank(mesh.get_group("pp"), members[index]) for index in range(len(plan.stages))]
    runtime.fwd_recv_ops = TrackedReceives("output of", -1, owners, inputs.device, inputs.message_timeout)
    runtime.bwd_recv_ops = TrackedReceives("gradient for", 1, owners, inputs.device, inputs.message_timeout)
    return Pipeline(inputs, coordinate.dp, stages, runtime, _tied(inputs, coordinate, stages), in_flight)


def _build_stage(
    inputs: PipelineInputs,
    mesh: DeviceMesh,
    index: int,
    replica: int,
    sums: LevelSums | None,
    in_flight: SumsInFlight,
) -> InstrumentedStage:
    spec, count = inputs.spec, len(inputs.plan.stages)
    rows = inputs.plan.replicas[replica].micro_batch
    first, last = index == 0, index == count - 1
    start, stop = inputs.plan.stages[index].layers
    module = build_part(spec, StageBlocks(start, stop, first, last), inputs.seed, inputs.fill)
    if inputs.plan.shards == 1 or inputs.plan.tp > 1:
        module.to(inputs.device)  # sharding moves a plain stage to the device block by block
    if inputs.plan.tp > 1:
        apply_tensor_parallel(module, mesh["tp"], spec, inputs.plan.sequence_parallel, sums)
    blocks = list(blocks_of(module).values())
    recompute_blocks(blocks, inputs.plan.stages[index].recompute)
    if inputs.compile:
        set_safe_path(os.environ)  # torch tests processor instructions in a `python -c`
        for block in blocks:
            block.compile()
    kind: Callable[..., InstrumentedStage] = InstrumentedStage
    if inputs.plan.shards > 1:
        gathered = inputs.autocast if spec.gathers_in_compute_dtype else None
        apply_sharding(module, sharding_mesh(mesh, inputs.plan), inputs.plan.zero, gathered)
        kind = partial(ShardedStage, plan=inputs.plan, mesh=mesh, in_flight=in_flight)
    most_sends = None
    if inputs.device.type == "cpu":
        most = micro_batches_in_flight(inputs.schedule)
        most_sends = most.get(index - 1, 0), most[index]
    # With static shapes on every stage, torch needs no trial run of the real model at the first step.
    tokens = torch.empty(rows, inputs.seq_len, dtype=torch.long, device="meta")
    return kind(
        module,
        index,
        count,
        inputs.device,
        input_args=tokens if first else _hidden(inputs, rows, start),
        output_args=_logits(inputs, rows) if last else _hidden(inputs, rows, stop),
        group=mesh.get_group("pp"),
        post=_batch_p2p,
        message_timeout=inputs.message_timeout,
        most_sends=most_sends,
        autocast=inputs.autocast,
        before="none" if first else inputs.plan.messages(replica, index - 1),
        behind=inputs.plan.messages(replica, index),
    )


def _tied(inputs: PipelineInputs, coordinate: Coordinate, stages: list[InstrumentedStage]) -> TiedWeights:
    shared = inputs.spec.shared_weights([stage.layers for stage in inputs.plan.stages])
    held = {stage.stage_index: stage.submod for stage in stages}
    return tie_weights(inputs.plan, coordinate.rank, shared, held, inputs.timeout)


def _hidden(inputs: PipelineInputs, rows: int, cut: int) -> Tensor:
    """Return the tensor [rows, seq, dim] that a stage sends at a cut, on one device of a tensor-parallel group, as a
    meta tensor. With sequence parallelism, `seq` is the device's part of the sequence.

    Args:
        inputs: the arguments of `build_pipeline`.
        rows: sequences of a micro-batch.
        cut: number of blocks before the cut.
    """
    seq = inputs.spec.boundary_length(inputs.seq_len, cut)
    if inputs.plan.sequence_parallel:
        seq //= inputs.plan.tp
    return torch.empty(rows, seq, inputs.spec.dim, device="meta", requires_grad=True)


def _logits(inputs: PipelineInputs, rows: int) -> Tensor:
    """Return the output of the last stage as a meta tensor: logits, or this rank's part of them if the vocabulary is
    split.

    Args:
        inputs: the arguments of `build_pipeline`.
        rows: sequences of a micro-batch.
    """
    width = inputs.spec.vocabulary
    if vocabulary_is_split(inputs.spec, inputs.plan.tp):
        width //= inputs.plan.tp
    dtype = inputs.autocast or torch.float32
    return torch.empty(rows, inputs.lengths.outputs, width, dtype=dtype, device="meta", requires_grad=True)
