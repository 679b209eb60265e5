"""Trains a model with one of the methods that the compression bench compares: a gradient synchronisation, or a pipeline
whose stage messages or gradients are compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.bench.compression.launch import LATE, LaunchSettings
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.launch.small_run import make_plan
from hpctrain.parallel.gradient_reducer import build_plan_reducer
from hpctrain.parallel.gradients import clip_gradients, gradient_norm, local_gradients
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.records.plan.plan import Plan
from hpctrain.schedule.resolve import schedule_of


@dataclass(frozen=True)
class PipelineMethod:
    """A pipeline in the comparison."""

    messages: Messages = "none"
    """Compression of the stage messages."""
    codec: str = "none"
    """Mode of the compression of gradients."""
    pp: int | None = None
    """Pipeline ranks, each with two stages; None: as many as processes, each with one stage."""
    early: bool = True
    """Whether a stage's gradients are summed while the pipeline goes on."""


PIPELINES = {
    "pp_fp32": PipelineMethod(),
    "pp_bf16": PipelineMethod("bf16"),
    "pp_int8": PipelineMethod("int8"),
}
"""Name of a pipeline over all processes -> its settings."""
HYBRIDS = {
    f"hybrid_{codec}{'' if early else LATE}": PipelineMethod(codec=codec, pp=2, early=early)
    for codec in ("none", "bf16", "int8")
    for early in (True, False)
}
"""Name of a plan with several replicas of a pipeline -> its settings. 'late': all sums begin after the pipeline."""
PIPELINE_SPEC = DecoderSpec(layers=4, dim=256, heads=4, vocab=320)
"""A narrow model, in which stage messages weigh much: a message has `dim` values per token, and the products of a block
take only about 12·dim² multiplications per token."""
CLIP_NORM = 1.0


@dataclass(frozen=True)
class GradientSync:
    """How a method sums gradients over the processes: a module whose backward pass may communicate, and functions that
    communicate after the backward pass and after the step. The default functions communicate nothing, so with them each
    process trains on its own data alone. The cost of a method is its step time minus the step time with the default
    functions.
    """

    model: nn.Module
    """The module to call with tokens: the model itself, or the wrapper around it."""
    averages: bool = True
    """Whether the method averages gradients over the processes, as DDP and FSDP do; otherwise it sums them."""
    reduce: Callable[[], int | None] = lambda: 0
    """Synchronises after the backward pass; returns the payload bytes that this rank sent, None if not counted."""
    after_step: Callable[[int], int] = lambda step: 0
    """Called with the number of the optimizer step that was made, the first is 1. Synchronises; returns the payload
    bytes that this rank sent."""
    planned: Plan | None = None
    """The plan whose codec and levels of sums the method has; None for a method that does not ask the planner."""


class BenchTrainer:
    """A model with its optimizer and the gradient synchronisation of one method of the compression bench. It trains on
    the sequences that its process passes to `step`."""

    def __init__(
        self,
        exchange: GradientSync,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        world: int,
        clip_norm: float | None,
    ) -> None:
        self.exchange = exchange
        self._parameters = list(exchange.model.parameters())
        self.optimizer = optimizer(self._parameters)
        self._scale = 1.0 if exchange.averages else 1.0 / world
        self._clip_norm = clip_norm
        self._steps = 0
        self.planned = exchange.planned

    def step(self, rows: Tensor) -> int | None:
        """Make one optimizer step; return the payload bytes that this rank sent, None if not counted. Collective.

        Args:
            rows: tokens of this process's sequences, int64 [sequences, seq_len + 1]; every process passes equally many.
        """
        loss = _loss(self.exchange.model, rows)
        (loss * self._scale).backward()
        sent = self.exchange.reduce()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        after = self.exchange.after_step(self._steps)
        return None if sent is None else sent + after

    @torch.no_grad()
    def validate(self, rows: Tensor) -> float:
        """Return the mean over all processes of their loss on the sequences `rows`, because the processes' replicas may
        differ between two outer syncs. Collective.

        Args:
            rows: tokens, int64 [sequences, seq_len + 1].
        """
        loss = _loss(self.exchange.model, rows).detach().double()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class PipelineBenchTrainer:
    """This process's stages of a pipeline with their optimizer. The schedule is 1F1B, interleaved with two stages a
    process, with micro-batches of one sequence. Every process receives all sequences."""

    planned: Plan | None = None
    """Always None: the planner chooses no codec for a pipeline of the bench."""

    def __init__(self, plan: Plan, pipeline: Pipeline, reducer: Reducer, replica: int, lr: float) -> None:
        self._plan = plan
        self._pipeline = pipeline
        self._reducer = reducer
        count = plan.replicas[replica].sequences
        self._own = slice(replica * count, (replica + 1) * count)
        self._parameters = [parameter for _, parameter in pipeline.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=lr)

    def step(self, rows: Tensor) -> int:
        """Make one optimizer step; return the payload bytes that this rank sent. Collective.

        Args:
            rows: tokens of the global batch, int64 [sequences, seq_len + 1].
        """
        self._pipeline.step(*self._examples(rows))
        sent = self._reducer.reduce(local_gradients(self._parameters))
        clip_gradients(self._parameters, gradient_norm(self._parameters, self._plan), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sent + sum(counters.sent_bytes for counters in self._pipeline.take_counters().values())

    def validate(self, rows: Tensor) -> float:
        """Return the mean loss on the sequences `rows`, without the last ones, which do not fill a global batch.
        Collective.

        Args:
            rows: tokens, int64 [sequences, seq_len + 1].
        """
        whole = [part for part in rows.split(self._plan.sequences) if len(part) == self._plan.sequences]
        loss = torch.tensor([self._pipeline.evaluate(*self._examples(part)) for part in whole], dtype=torch.float64)
        dist.all_reduce(loss)
        return float(loss.mean())

    def _examples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[self._own, :-1], rows[self._own, 1:]


def open_pipeline(method: PipelineMethod, settings: LaunchSettings, rank: int, world: int) -> PipelineBenchTrainer:
    """Return this process's part of a plan over all processes. Collective."""
    pp = method.pp or world
    replicas, chunks = world // pp, 1 if method.pp is None else 2
    plan = make_plan(pp, replicas, settings.spec.layers, 1, pp * settings.rows, chunks=chunks)
    *first, last = plan.stages
    codec = CodecSpec(codec=make_codec({"mode": method.codec}))
    plan = plan.model_copy(
        update={
            "stages": [*(stage.model_copy(update={"messages": method.messages}) for stage in first), last],
            "compression": [codec],
        }
    )
    coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, "cpu")
    schedule, _ = schedule_of(plan, coordinate.dp)
    inputs = PipelineInputs(plan, settings.spec, schedule, settings.seq_len, settings.seed, torch.device("cpu"))
    pipeline = build_pipeline(inputs, mesh, coordinate)
    reducer = build_plan_reducer(plan, mesh, pipeline, "always" if method.early else "never")
    return PipelineBenchTrainer(plan, pipeline, reducer, coordinate.dp, settings.lr)
