"""The parts of a training step that differ if the state lies in memory that outlives the process."""

from __future__ import annotations

import json
import math

from hpctrain.checkpoint.memory.live_state import LiveState
from hpctrain.checkpoint.memory.segment import StepVerdict
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
    encoded = b""
    if math.isfinite(job.loss):
        # No plan with this memory has GPUs, whose data sheets `mfu` needs.
        row = metric_row(trainer, step, job, LocalStepInfo(seconds, lr, math.nan, {}, None, scale), None)
        encoded = json.dumps(row.to_json(), allow_nan=False).encode()
    live.keep_gradients(step, local_gradients(trainer.parameters), trainer.reducer.state(), encoded)


def update_live(trainer: Trainer, live: LiveState, norm: float, lr: float) -> bool:
    """Clip the gradients and update the weights. Return False, and change nothing, if the norm is not finite for
    another reason than the loss scale.

    Args:
        norm: norm of the whole model's gradient.
        lr: learning rate of the step.
    """
    if trainer.ring is not None:
        trainer.ring.wait_copied()
    skipped = trainer.scaler is not None and trainer.scaler.skips(norm)
    if not skipped and not math.isfinite(norm):
        return False
    loss_scale = trainer.scaler.state if trainer.scaler is not None else trainer.past_scale
    live.update(trainer.step + 1, StepVerdict(norm, lr, loss_scale), local_gradients(trainer.parameters))
    trainer.optimizer.zero_grad(set_to_none=True)
    return True
