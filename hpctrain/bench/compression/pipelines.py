"""Pipelines that `hpctrain bench compression --activations` compares: they differ in how stage messages are
compressed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.bench.compression.bench_trainer import StepResult
from hpctrain.bench.compression.launch_files import LaunchSettings
from hpctrain.bench.small_run import make_plan
from hpctrain.parallel.gradients import clip_gradients, gradient_norm
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.model.families import DecoderSpec
from hpctrain.records.plan.compression import CodecSpec
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.records.plan.plan import Plan
from hpctrain.schedule.resolve import schedule_of

PIPELINES: dict[str, Messages] = {"pp_fp32": "none", "pp_bf16": "bf16", "pp_int8": "int8"}
"""Compression of all stage messages, by the pipeline's name in the comparison."""
PIPELINE_SPEC = DecoderSpec(layers=4, dim=256, heads=4, vocab=320)
"""A narrow model: a stage message has `dim` values per token, a block's products about 12·dim² multiplications."""
CLIP_NORM = 1.0


class PipelineBenchTrainer:
    """One pipeline stage per node, 1F1B with micro-batches of one sequence; every process receives all sequences."""

    planned: CodecSpec | None = None

    def __init__(self, plan: Plan, pipeline: Pipeline, lr: float) -> None:
        self._plan = plan
        self._pipeline = pipeline
        self._parameters = [parameter for _, parameter in pipeline.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=lr)

    def step(self, rows: Tensor) -> StepResult:
        """Make one step on int64 [sequences of the plan, seq_len + 1]. The returned loss is that of the last stage; on
        other stages it is 0."""
        loss = self._pipeline.step(rows[:, :-1], rows[:, 1:])
        clip_gradients(self._parameters, gradient_norm(self._parameters, self._plan), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        sent = sum(counters.sent_bytes for counters in self._pipeline.take_counters().values())
        return StepResult(torch.tensor(loss), sent)

    def validate(self, rows: Tensor) -> float:
        """Return the mean loss of `rows`, without the last ones that do not fill a whole step. Collective."""
        whole = [part for part in rows.split(self._plan.sequences) if len(part) == self._plan.sequences]
        loss = torch.tensor([self._pipeline.evaluate(part[:, :-1], part[:, 1:]) for part in whole], dtype=torch.float64)
        dist.all_reduce(loss)
        return float(loss.mean())


def open_pipeline(messages: Messages, settings: LaunchSettings, rank: int, world: int) -> PipelineBenchTrainer:
    """Return this process's stage of a pipeline over all processes. Collective."""
    plan = make_plan(world, 1, settings.spec.layers, 1, world * settings.rows)
    *first, last = plan.stages
    plan = plan.model_copy(
        update={"stages": [*(stage.model_copy(update={"messages": messages}) for stage in first), last]}
    )
    coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, "cpu")
    schedule, _ = schedule_of(plan, coordinate.dp)
    inputs = PipelineInputs(plan, settings.spec, schedule, settings.seq_len, settings.seed, torch.device("cpu"))
    return PipelineBenchTrainer(plan, build_pipeline(inputs, mesh, coordinate), settings.lr)
