"""A model in training with one of the gradient synchronisations that the bench compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.records.plan.compression import CodecSpec


class GradientSync:
    """Base class of the methods that sum gradients over the processes. It communicates nothing: each process trains on
    its own data, so the time of another method minus its time is the cost of that method."""

    averages = True
    """Whether gradients are averaged over the processes, as by DDP and FSDP; otherwise they are summed."""
    planned: CodecSpec | None = None
    """The codec that the planner chose; None for a method that does not ask the planner."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The module that is called with tokens."""

    def reduce(self) -> int | None:
        """Synchronise after the backward pass; return the bytes that this rank sent, None if not counted."""
        return 0

    def after_step(self) -> int:
        """Synchronise after the optimizer step; return the bytes that this rank sent."""
        return 0


class TorchSync(GradientSync):
    """A model wrapped by DDP or FSDP2, which sum gradients during the backward pass."""

    def __init__(self, model: nn.Module, sent_bytes: int | None) -> None:
        super().__init__(model)
        self._sent_bytes = sent_bytes

    def reduce(self) -> int | None:
        return self._sent_bytes


class ReducerSync(GradientSync):
    """A plain module whose gradients an hpctrain reducer sums after the backward pass."""

    averages = False

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        super().__init__(model)
        self._reducer = reducer
        self._parameters = list(model.parameters())
        self._step = 0

    def reduce(self) -> int | None:
        return self._reducer.reduce([p.grad for p in self._parameters if p.grad is not None])

    def after_step(self) -> int:
        self._step += 1
        return self._reducer.after_step(self._step)


@dataclass(frozen=True)
class StepResult:
    """Loss and sent bytes of one step."""

    loss: Tensor
    """Mean loss over this process's sequences, before the step."""
    sent_bytes: int | None


class BenchTrainer:
    """A model with its optimizer and gradient synchronisation; `step` takes the sequences of this process."""

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

    @property
    def planned(self) -> CodecSpec | None:
        """The codec that the planner chose; None for a method that does not ask the planner."""
        return self.exchange.planned

    def step(self, rows: Tensor) -> StepResult:
        """Make one step on int64 [sequences, seq_len + 1]; every process passes equally many sequences."""
        loss = _loss(self.exchange.model, rows)
        (loss * self._scale).backward()
        sent = self.exchange.reduce()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        after = self.exchange.after_step()
        return StepResult(loss.detach(), None if sent is None else sent + after)

    @torch.no_grad()
    def validate(self, rows: Tensor) -> float:
        """Return the loss on `rows`, which every process passes alike: the mean over the processes, as replicas may
        differ between two outer syncs. Collective."""
        loss = _loss(self.exchange.model, rows).detach().double()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
