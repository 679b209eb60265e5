"""Training loops written with torch alone, on the model, data and optimizer of a trainer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.model.build import build_stage
from hpctrain.worker.build import Trainer


class PlainLoop:
    """A plain training loop: one process, or several with torch's DistributedDataParallel."""

    def __init__(self, trainer: Trainer, distributed: bool) -> None:
        run, spec = trainer.run, trainer.run.spec()
        self._trainer = trainer
        self._module = build_stage(spec, 0, spec.layers, run.seed)
        self._model: nn.Module = DistributedDataParallel(self._module) if distributed else self._module
        settings = run.optimizer
        parameters = list(self._module.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True,
        )  # fmt: skip
        self._clip_norm = settings.clip_norm
        self._step = 0

    def step(self) -> float:
        """Make one optimizer step on this process's share of the batch; return its mean loss."""
        trainer = self._trainer
        first, count = trainer.rows
        start = self._step * trainer.plan.sequences + first
        batch = trainer.train.batch(trainer.run.seed, start, count)
        loss = F.cross_entropy(self._model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._module.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return float(loss.detach())
