"""The pipeline of a plan, run by torch's schedule executor from our compute-only action table.

This is the one file that touches private names of torch.distributed.pipelining (checked for torch 2.11 to 2.14):
`_PipelineScheduleRuntime`, `_Action` and `_ComputationType`. Every plan runs through it, pp = 1 included: one path.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.tensor.parallel import loss_parallel

from hpctrain.model.build import build_part
from hpctrain.parallel.loss import make_loss
from hpctrain.parallel.mesh import Coordinate, group_rank
from hpctrain.parallel.randomness import RandomStream
from hpctrain.parallel.stage import CountedStage, StageCounters, seconds_of
from hpctrain.parallel.tensor import apply_tensor_parallel, vocabulary_is_split
from hpctrain.records.model_spec import ModelSpec
from hpctrain.records.plan import Plan
from hpctrain.records.schedule import Schedule

Order = dict[int, list[_Action]]
"""Actions by rank in the pipeline's process group, sends and receives included."""


@dataclass(frozen=True)
class PipelineInputs:
    """What a pipeline is built from."""

    plan: Plan
    spec: ModelSpec
    schedule: Schedule
    """The action table of this rank's replica."""
    seq_len: int
    seed: int
    device: torch.device
    autocast: torch.dtype | None = None
    """bfloat16 for matrix products in that precision; None: fp32 throughout."""


class Pipeline:
    """The stages that this rank holds and the schedule that runs them."""

    def __init__(
        self,
        stages: list[CountedStage],
        runtime: _PipelineScheduleRuntime,
        evaluation: Order,
        replica_rows: int,
        split_loss: bool,
        random: RandomStream,
    ) -> None:
        self.stages = stages
        self.random = random
        self.rows = replica_rows
        """Sequences of this replica in a step."""
        self.first = any(stage.is_first for stage in stages)
        self.last = any(stage.is_last for stage in stages)
        self.step_s = 0.0
        """How long the schedule of the last training step took on this rank."""
        self._runtime = runtime
        self._training: Order = runtime.pipeline_order_with_comms
        self._evaluation = evaluation
        self._split_loss = split_loss

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of this replica's share of a batch; gradients are left in the parameters, not reduced.

        Args:
            tokens, targets: [rows, seq], both of this replica.

        Returns:
            This replica's share of the mean loss (0 on ranks without the last stage).
        """
        start = seconds_of(self.device)
        loss = self._run(tokens, targets, train=True)
        self.step_s = seconds_of(self.device) - start
        return loss

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward only, nothing kept for a backward pass; as `step`."""
        for stage in self.stages:
            stage.submod.eval()
        try:
            with torch.no_grad():
                return self._run(tokens, targets, train=False)
        finally:
            for stage in self.stages:
                stage.submod.train()

    @property
    def device(self) -> torch.device:
        return self.stages[0].device

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names (the same however the model is cut) and parameters of this rank."""
        return [item for stage in self.stages for item in stage.submod.named_parameters()]

    def layers(self) -> list[int]:
        """Global numbers of the blocks that this rank really holds."""
        return sorted(int(name) for stage in self.stages for name in stage.submod.layers)  # type: ignore[union-attr]

    def take_counters(self) -> dict[int, StageCounters]:
        """Counters by stage since the last call."""
        taken = {stage.stage_index: stage.counters for stage in self.stages}
        for stage in self.stages:
            stage.counters = StageCounters()
        return taken

    def _run(self, tokens: Tensor, targets: Tensor, train: bool) -> float:
        # gloo accepts a message shorter than the buffer without an error, so a wrong shape must never get that far.
        if tokens.shape != targets.shape or tokens.shape[0] != self.rows:
            raise ValueError(
                f"tokens are {tuple(tokens.shape)}, expected {self.rows} rows and targets of the same shape"
            )
        losses: list[Tensor] = []
        # torch's own evaluation walks through the backward actions too and fails where two neighbouring stages share a
        # rank, so it is given a table without them.
        self._runtime.pipeline_order_with_comms = self._training if train else self._evaluation
        call = self._runtime.step if train else self._runtime.eval
        with loss_parallel() if self._split_loss else contextlib.nullcontext():
            call(
                *([tokens] if self.first else []),
                target=targets if self.last else None,
                losses=losses,
                return_outputs=False,
            )
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else 0.0


def build_pipeline(inputs: PipelineInputs, mesh: DeviceMesh, coordinate: Coordinate) -> Pipeline:
    """Build this rank's stages in the fixed order: seeded plain stage, tensor parallel, pipeline stage, schedule."""
    plan, spec = inputs.plan, inputs.spec
    replica = plan.replicas[coordinate.dp]
    owner = plan.stage_owner()
    stages = [
        _build_stage(inputs, mesh, index, replica.micro_batch)
        for index in range(len(plan.stages))
        if owner[index] == coordinate.pp
    ]
    random = RandomStream(inputs.seed, coordinate.dp, inputs.device)
    for stage in stages:
        stage.random = random
    split_loss = vocabulary_is_split(spec, plan.tp)
    loss = make_loss(plan.rows * inputs.seq_len, mesh["tp"] if split_loss else None)
    if stages[-1].is_last:
        loss = stages[-1].timed(loss)
    runtime = _PipelineScheduleRuntime(stages, replica.micro_batches, loss_fn=loss, scale_grads=False)
    runtime._prepare_schedule_with_comms(_actions_by_group_rank(inputs, mesh, coordinate))
    evaluation = _forwards(runtime.pipeline_order_with_comms)
    return Pipeline(stages, runtime, evaluation, replica.rows, split_loss, random)


def _build_stage(inputs: PipelineInputs, mesh: DeviceMesh, index: int, rows: int) -> CountedStage:
    spec, count = inputs.spec, len(inputs.plan.stages)
    first, last = index == 0, index == count - 1
    start, stop = inputs.plan.stages[index].layers
    module = build_part(spec, start, stop, first=first, last=last, seed=inputs.seed).to(inputs.device)
    if inputs.plan.tp > 1:
        apply_tensor_parallel(module, mesh["tp"], spec)
    # Static shapes on every stage spare torch the trial run of the real model at the first step.
    hidden = torch.empty(rows, inputs.seq_len, spec.dim, device="meta", requires_grad=True)
    tokens = torch.empty(rows, inputs.seq_len, dtype=torch.long, device="meta")
    return CountedStage(
        module,
        index,
        count,
        inputs.device,
        input_args=tokens if first else hidden,
        output_args=_logits(inputs, rows) if last else hidden,
        group=mesh.get_group("pp"),
        autocast=inputs.autocast,
    )


def _logits(inputs: PipelineInputs, rows: int) -> Tensor:
    """The last stage's output as a shape: local logits where the vocabulary is split."""
    width = inputs.spec.vocabulary
    if vocabulary_is_split(inputs.spec, inputs.plan.tp):
        width //= inputs.plan.tp
    dtype = inputs.autocast or torch.float32
    return torch.empty(rows, inputs.seq_len, width, dtype=dtype, device="meta", requires_grad=True)


def _actions_by_group_rank(
    inputs: PipelineInputs, mesh: DeviceMesh, coordinate: Coordinate
) -> dict[int, list[_Action | None]]:
    """The table under the ranks of torch's process group, which orders its members by global rank."""
    column = [pp_row[coordinate.dp] for pp_row in inputs.plan.mesh()]
    actions: dict[int, list[_Action | None]] = {}
    for pp, row in enumerate(inputs.schedule.ranks):
        member = sorted(column[pp])[coordinate.tp]
        actions[group_rank(mesh, "pp", member)] = [_Action.from_str(str(action)) for action in row]
    return actions


def _forwards(order: Order) -> Order:
    """The same order without backwards and their messages.

    torch lowers a table by running it in thought, each send beside its receive; leaving pairs out keeps that run valid,
    so what is left cannot wait for ever either.
    """
    kept = (_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F)
    return {rank: [action for action in row if action.computation_type in kept] for rank, row in order.items()}
