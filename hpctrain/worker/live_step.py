"""The parts of a training step that differ if the state, or snapshots of it, outlive the process."""

from __future__ import annotations

import json
import math

from hpctrain.checkpoint.memory.live_state import LiveState
from hpctrain.checkpoint.memory.segment import StepVerdict
from hpctrain.checkpoint.memory.snapshots import StepNotes
from hpctrain.parallel.gradients import local_gradients
from hpctrain.records.run.optimizer import learning_rate
from hpctrain.worker.build import Trainer
from hpctrain.worker.step_metrics import LocalStepInfo, StepFigures, metric_row


def keep_gradients(trainer: Trainer, live: LiveState, job: StepFigures, seconds: float, scale: float | None) -> None:
    """Copy what another process needs to finish the step under way: the reduced gradients, what the reducer keeps, and
    the row of metrics.jsonl without the norm.

    Args:
        job: the step's figures over all ranks.
        seconds: duration of the step up to now.
        scale: loss scale of the backward pass; None without one.
    """
    step = trainer.step + 1
    lr = learning_rate(trainer.run.optimizer, trainer.step, trainer.run.steps)
    row = _encoded_row(trainer, step, job, LocalStepInfo(seconds, lr, math.nan, {}, None, scale))
    live.keep_gradients(step, local_gradients(trainer.parameters), trainer.reducer.state(), row)


def wait_copied(trainer: Trainer) -> None:
    """Wait until a snapshot that is being made no longer needs the present state."""
    if trainer.ring is not None:
        trainer.ring.wait_copied()


def begin_snapshot(trainer: Trainer, job: StepFigures, info: LocalStepInfo) -> None:
    """Begin a snapshot of the step just done, if one is due.

    Args:
        job: the step's figures over all ranks.
        info: this rank's figures of the step.
    """

    def notes() -> StepNotes:
        loss_scale = trainer.scaler.state if trainer.scaler is not None else trainer.past_scale
        row = _encoded_row(trainer, trainer.step, job, info)
        return StepNotes(StepVerdict(info.grad_norm, info.lr, loss_scale), trainer.reducer.state(), row)

    if trainer.ring is not None:
        trainer.ring.begin_if_due(trainer.step, info.seconds, job.snapshot_step, job.snapshot_every, notes)


def _encoded_row(trainer: Trainer, step: int, job: StepFigures, info: LocalStepInfo) -> bytes:
    """Return the row of metrics.jsonl as JSON, without `mfu`; empty if the loss is not finite."""
    if not math.isfinite(job.loss):
        return b""
    return json.dumps(metric_row(trainer, step, job, info, None).to_json(), allow_nan=False).encode()


def update_live(trainer: Trainer, live: LiveState, norm: float, lr: float) -> bool:
    """Clip the gradients and update the weights, or skip the update if the loss scale made the norm non-finite. Return
    True. If the norm is not finite for another reason, change nothing and return False.

    Args:
        norm: norm of the whole model's gradient.
        lr: learning rate of the step.
    """
    skipped = trainer.scaler is not None and trainer.scaler.skips(norm)
    if not skipped and not math.isfinite(norm):
        return False
    loss_scale = trainer.scaler.state if trainer.scaler is not None else trainer.past_scale
    live.update(trainer.step + 1, StepVerdict(norm, lr, loss_scale), local_gradients(trainer.parameters))
    trainer.optimizer.zero_grad(set_to_none=True)
    return True
