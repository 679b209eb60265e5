"""The training loop of a worker."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.agent.worker_messages import CheckpointSaved, Compiling, StepDone, WeightsHash
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import EXIT_DONE, EXIT_NEW_PLAN, EXIT_RESUMABLE, HpctrainError
from hpctrain.checkpoint.save import SaveResult
from hpctrain.checkpoint.state import collect, fingerprint
from hpctrain.parallel.gradients import clip_gradients, finite_everywhere, gradient_norm, local_gradients
from hpctrain.parallel.host_copy import HostCopy
from hpctrain.parallel.stage import StageCounters
from hpctrain.records.run.optimizer import learning_rate
from hpctrain.worker import disk_full
from hpctrain.worker.agent_channel import AgentChannel, Ending
from hpctrain.worker.batch_loader import BatchLoader, BatchPrefetcher, SampleBatch
from hpctrain.worker.build import Trainer, manifest_of, reducer_state_tensors
from hpctrain.worker.diagnose import diagnose
from hpctrain.worker.disk_full import PendingWrites
from hpctrain.worker.figures.rank_metrics import RankMetrics
from hpctrain.worker.live_step import begin_snapshot, keep_gradients, update_live, wait_copied
from hpctrain.worker.profiling import recorded_step
from hpctrain.worker.step_metrics import (
    LocalStepInfo,
    MetricsLog,
    StepFigures,
    gather_step_metrics,
    metric_row,
    peak_flops_of_plan,
    rank_placements,
    validation_fields,
)


def train(trainer: Trainer, agent_channel: AgentChannel) -> int:
    """Train until the last step or until an agent orders the end, and return the exit code of the worker: EXIT_DONE,
    EXIT_RESUMABLE after a stop at a checkpoint, or EXIT_NEW_PLAN.

    Raises:
        HpctrainError: the loss, the gradient or a validation's loss is not finite, or the last checkpoint could not be
            written.
        StorageError: the last rows of metrics.jsonl could not be written.
        Superseded: the worker's generation is over.
        RuntimeError: another rank is lost (an error of torch.distributed).
    """
    loop = Loop(trainer, agent_channel)
    if trainer.from_memory:
        loop.complete_restored_step()
    ending = Ending.NONE
    while trainer.step < trainer.run.steps and ending is Ending.NONE:
        ending = loop.next_step().ending
    done = trainer.step >= trainer.run.steps
    if ending is Ending.NEW_PLAN and trainer.live is not None and not done:
        loop.finish_writes()
        return EXIT_NEW_PLAN
    if ending is not Ending.NONE:
        # Without segments, the state of this step ends with the processes.
        loop.save()
    loop.finish_saving(wait_for_room=done or ending is not Ending.STOP)
    if done and trainer.run.deterministic:
        agent_channel.send(WeightsHash(sha256=fingerprint(trainer.pipeline.parameters())))
    return EXIT_DONE if done else EXIT_RESUMABLE if ending is Ending.STOP else EXIT_NEW_PLAN


class Loop:
    """The training loop of one rank, with its state between steps."""

    def __init__(self, trainer: Trainer, agent_channel: AgentChannel) -> None:
        self.trainer = trainer
        self.agent_channel = agent_channel
        self.saved_step = None if trainer.from_memory else trainer.step
        self._save_error: str | None = None
        self._metrics = MetricsLog(trainer.folder / "metrics.jsonl", trainer.fence)
        self._ranks = RankMetrics(trainer)
        self._first = True
        self._first_validation = True
        self._prefetcher = BatchPrefetcher(trainer.train)
        self._peak_flops = peak_flops_of_plan(trainer) if trainer.coordinate.rank == 0 else None

    def next_step(self) -> StepFigures:
        """Run one step, and record it if the run file's `profile` names it. Return the step's figures over all ranks.
        The errors are those of `one_step`."""
        ACTIVITY.begin_step(self.trainer.step + 1)
        with recorded_step(self.trainer):
            return self.one_step()

    def one_step(self) -> StepFigures:
        """Run one optimizer step: batch, pipeline, reduction, norm, update, metrics, checkpoint, validation, report.
        Return the step's figures over all ranks.

        Raises:
            HpctrainError: the loss, the gradient or a validation's loss is not finite.
            Superseded: the worker's generation is over.
        """
        trainer, start = self.trainer, time.perf_counter()
        share, gradients = self._forward_backward(trainer.step)
        loss_copy = HostCopy(share)
        scale = trainer.scaler.state.value if trainer.scaler is not None else None
        dp_bytes = self._reduce(gradients)
        trainer.pipeline.all_reduce_tied_gradients()
        counters, job = trainer.pipeline.take_counters(), None
        if trainer.live is not None:
            job = self._gather(loss_copy, counters, dp_bytes)
            with ACTIVITY.doing("keep the gradients"):
                keep_gradients(trainer, trainer.live, job, time.perf_counter() - start, scale)
        with ACTIVITY.doing("all-reduce of the gradient's norm", waits="world"):
            holders, keeps = trainer.pipeline.tied_holders(), trainer.live is not None
            total = gradient_norm(trainer.parameters, trainer.plan, holders, together=keeps)
        with ACTIVITY.doing("optimizer"):
            lr, norm = self._update(total)
        dp_bytes += trainer.reducer.after_step(trainer.step + 1)
        seconds = time.perf_counter() - start
        if job is None:
            job = self._gather(loss_copy, counters, dp_bytes)
        trainer.step += 1
        # In fp16 a non-finite norm may only mean that the loss scale is too large; the loss itself does not contain it.
        if not math.isfinite(job.loss):
            raise self._no_number(trainer.step, norm)
        self._ranks.gather()
        placed = rank_placements(trainer, counters) if self._first else None
        self._first, info = False, LocalStepInfo(seconds, lr, norm, {}, placed, scale)
        begin_snapshot(trainer, job, info)
        self.save_if_due()
        self._validate_and_report(job, info)
        self._report_saved(trainer.saver.finished())
        if placed is not None and self.saved_step != trainer.step:
            # Not before: after a fault, the first step must not wait for memory that only a save needs.
            trainer.saver.prepare(collect(trainer.pipeline.parameters(), trainer.optimizer))
        return job

    def complete_restored_step(self) -> None:
        """Do what killed workers may have left undone after the step of the state in memory: save its checkpoint,
        validate, and write its row of metrics.jsonl. Collective over all ranks.

        Raises:
            HpctrainError: a validation's loss is not finite.
            UntrustedError: metrics.jsonl belongs to somebody else, or others can write to it.
            Superseded: the worker's generation is over.
        """
        self.save_if_due()
        trainer, row = self.trainer, self.trainer.restored_row
        if row is None:
            return
        flag = torch.tensor(int(trainer.coordinate.rank == 0 and not self._metrics.has_step(row.step)))
        dist.broadcast(flag, 0)
        missing = bool(flag)
        if missing and trainer.valid and self._is_due(trainer.run.validation.every):
            row = row.model_copy(update=validation_fields(self._validate()))
        if missing and trainer.coordinate.rank == 0:
            self._metrics.write(row)

    def save_if_due(self) -> None:
        """Start writing a checkpoint if one is due after the current step."""
        if self._is_due(self.trainer.run.checkpoint.every):
            self.save()

    def save(self) -> None:
        """Start writing a checkpoint of the current step, unless that was already started. The call first waits
        until the previous checkpoint is written."""
        trainer = self.trainer
        if self.saved_step == trainer.step:
            return
        with ACTIVITY.doing("wait for the writer of the checkpoint before"):
            self._report_saved(trainer.saver.finished(wait=True))
        trainer.reducer.before_checkpoint()
        self._start_saving()
        self.saved_step = trainer.step

    def finish_writes(self) -> None:
        """Wait until nothing is being written any more, and drop what could not be written. Raise Superseded if the
        worker's generation is over."""
        self._wait_for_writer()
        self._close()
        self._metrics.try_flush()

    def _wait_for_writer(self) -> None:
        with ACTIVITY.doing("wait for the writer of the last checkpoint"):
            self._report_saved(self.trainer.saver.finished(wait=True))

    def _close(self) -> None:
        self.trainer.saver.close()
        if self.trainer.ring is not None:
            self.trainer.ring.close()

    def finish_saving(self, wait_for_room: bool) -> None:
        """Wait until the last checkpoint and all rows of metrics.jsonl are on disk.

        Args:
            wait_for_room: whether to try again on a full disk, for `checkpoint.wait_for_room_s` of the run file.

        Raises:
            HpctrainError: the last checkpoint could not be written.
            StorageError: rows of metrics.jsonl could not be written.
            Superseded: the worker's generation is over.
        """
        self._wait_for_writer()
        if wait_for_room:
            limit_s = self.trainer.run.checkpoint.wait_for_room_s
            writes = PendingWrites(self.trainer.step, self._save_again, self._metrics.try_flush)
            self._save_error = disk_full.retry_until_written(writes, self._save_error, limit_s, self.agent_channel)
        self._close()
        self._metrics.flush()
        if self._save_error is not None:
            self.trainer.fence.check()
            raise HpctrainError(f"the last checkpoint could not be written: {self._save_error}")

    def _save_again(self) -> str | None:
        """Write the current step's checkpoint once more. Return the error; None if the checkpoint is on disk. Only a
        success is reported to the agent, because the failure was already reported."""
        self._start_saving()
        saved = self.trainer.saver.finished(wait=True)
        assert saved is not None, "it was just started"
        if saved.error is None:
            self._report_saved(saved)
        return saved.error

    def _start_saving(self) -> None:
        trainer = self.trainer
        named = trainer.pipeline.parameters()
        with ACTIVITY.doing("checkpoint copy"):
            tensors = collect(named, trainer.optimizer) | reducer_state_tensors(trainer.reducer, trainer.coordinate)
            trainer.saver.save(tensors, manifest_of(trainer))

    def _gather(self, loss_copy: HostCopy, counters: dict[int, StageCounters], dp_bytes: int) -> StepFigures:
        """Return the figures of the present step over all ranks. Collective over all ranks.

        Args:
            loss_copy: of this replica's share of the loss.
            counters: stage -> what this rank counted.
            dp_bytes: bytes that this rank sent for the reduction over replicas.
        """
        ending = self.agent_channel.ending()
        with ACTIVITY.doing("wait for the loss", waits="device" if self.trainer.device.type == "cuda" else None):
            loss_share = loss_copy.value()
        return gather_step_metrics(self.trainer, loss_share, counters, dp_bytes, self._ranks.tp_bytes, ending)

    def _forward_backward(self, step: int) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward. Return (this replica's share of the global batch's mean loss, this rank's gradients
        before their reduction over replicas).

        Args:
            step: number of steps done before.
        """
        self.trainer.pipeline.random.step = step
        with ACTIVITY.doing("read the batch"):
            (first, count), sequences = self.trainer.rows, self.trainer.plan.sequences
            batch = self._prefetcher.batch(self.trainer.run.seed, step * sequences + first, count, sequences)
        with self._ranks.watched_passes():
            share = self.trainer.pipeline.step(*batch)
            gradients = local_gradients(self.trainer.parameters)
        return share, gradients

    def _reduce(self, gradients: list[Tensor]) -> int:
        """Sum the gradients over the replicas in place, divide out the loss scale, and return the bytes that this
        rank sent."""
        trainer = self.trainer
        scaler, keeps = trainer.scaler, trainer.plan.codec.has_state
        if scaler is not None and keeps:
            # Unscale first: residuals live longer than a loss scale, and a skipped step must not change them.
            scaler.unscale(gradients)
            with ACTIVITY.doing("all-reduce of whether gradients overflowed", waits="world"):
                if not finite_everywhere(gradients):
                    gradients[0].fill_(math.nan)  # so that the norm is NaN on every rank
                    return 0
        self._ranks.observe(gradients, summed=False)
        with ACTIVITY.doing("reduce dp", waits="dp"):
            sent = trainer.reducer.reduce(gradients)
        if scaler is not None and not keeps:
            scaler.unscale(gradients)
        self._ranks.observe(gradients, summed=True)
        return sent

    def _update(self, norm: Tensor) -> tuple[float, float]:
        """Clip the gradients and update the weights, unless the norm is not finite. Return (learning rate, norm).

        The host reads the norm only after it has queued the update, and a GPU makes the update while the host goes on.

        Raises:
            HpctrainError: the norm is not finite, and not because of the loss scale; the weights are unchanged.
        """
        trainer, settings = self.trainer, self.trainer.run.optimizer
        lr = learning_rate(settings, trainer.step, trainer.run.steps)
        wait_copied(trainer)
        if trainer.live is not None:
            number = float(norm)
            if not update_live(trainer, trainer.live, number, lr):
                raise self._no_number(trainer.step + 1, number)
            return lr, number
        norm_copy = HostCopy(norm)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        fused = trainer.optimizer.defaults["fused"]
        if fused:
            # The fused kernels read this flag on the device, and do nothing if it is 1.
            trainer.optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        if fused or norm.isfinite():
            if settings.clip_norm is not None:
                clip_gradients(trainer.parameters, norm, settings.clip_norm)
            trainer.optimizer.step()
        number = norm_copy.value()
        skipped = trainer.scaler is not None and trainer.scaler.skips(number)
        if not skipped and not math.isfinite(number):
            raise self._no_number(trainer.step + 1, number)
        trainer.optimizer.zero_grad(set_to_none=True)
        return lr, number

    def _no_number(self, step: int, norm: float) -> HpctrainError:
        """Return the error for a training step whose loss or gradient is not finite, with the diagnosis, the same on
        every rank. Collective over all ranks."""
        trainer = self.trainer
        # The worker exits soon, and a good checkpoint must not be lost.
        self._report_saved(trainer.saver.finished(wait=True))
        self._report_compiling()  # blocks with hooks are compiled once more
        batch = self._batch(trainer.train, (step - 1) * trainer.plan.sequences, trainer.run.seed)
        return HpctrainError(diagnose(trainer, step, batch, norm, training=True))

    def _validate_and_report(self, job: StepFigures, info: LocalStepInfo) -> None:
        """Validate if it is due, then report the step. A failed validation loses neither the metrics row nor a
        checkpoint.

        Raises:
            Exception: the error of the validation, raised after the checkpoint that is being written is on disk.
        """
        try:
            if self.trainer.valid and self._is_due(self.trainer.run.validation.every):
                info = replace(info, valid_losses=self._validate())
        except Exception:
            self._report_saved(self.trainer.saver.finished(wait=True))
            raise
        finally:
            self._report_step(job, info)

    def _validate(self) -> dict[str, float]:
        """Return name of a validation set -> mean loss in nats per target, always over the same samples. Collective
        over all ranks.

        Raises:
            HpctrainError: a loss is not finite.
        """
        trainer = self.trainer
        if self._first_validation:
            self._first_validation = False
            self._report_compiling()  # once more: code compiled for training saves activations for a backward pass
        starts = [index * trainer.plan.sequences for index in range(trainer.run.validation.batches)]
        parts = [(loader, start) for loader in trainer.valid.values() for start in starts]
        shares = [trainer.pipeline.evaluate(*self._batch(loader, start, 0)) for loader, start in parts]
        losses = torch.tensor(shares, dtype=torch.float64)
        trainer.pipeline.take_counters()
        # Every tp rank computes the same loss, so only rank 0 of the tp group counts.
        losses *= trainer.coordinate.tp == 0
        with ACTIVITY.doing("all-reduce of the validation's losses", waits="world"):
            dist.all_reduce(losses)
        for loss, (loader, start) in zip(losses.tolist(), parts, strict=True):
            if not math.isfinite(loss):
                self._report_compiling()
                place = diagnose(trainer, trainer.step, self._batch(loader, start, 0), loss, training=False)
                raise HpctrainError(f"validation after {place}")
        means = losses.view(len(trainer.valid), -1).mean(1)
        return dict(zip(trainer.valid, means.tolist(), strict=True))

    def _report_compiling(self) -> None:
        """If the run compiles blocks, report it, so that the agent allows more time until the next step is reported."""
        if self.trainer.run.compile:
            self.agent_channel.send(Compiling())

    def _batch(self, loader: BatchLoader, start: int, seed: int) -> SampleBatch:
        """Return this replica's sequences of the global batch that starts at sample `start`, ordered by the seed."""
        first, count = self.trainer.rows
        return loader.batch(seed, start + first, count)

    def _is_due(self, every: int) -> bool:
        return self.trainer.step % every == 0 or self.trainer.step == self.trainer.run.steps

    def _report_step(self, job: StepFigures, info: LocalStepInfo) -> None:
        trainer = self.trainer
        if trainer.coordinate.rank == 0:
            self._metrics.write(metric_row(trainer, trainer.step, job, info, self._peak_flops))
            self._ranks.add(trainer.step, job.ranks)
        self.agent_channel.send(StepDone(step=trainer.step, loss=job.loss))

    def _report_saved(self, saved: SaveResult | None) -> None:
        if saved is None:
            return
        # Only the newest save counts, because it replaces an earlier one that failed.
        self._save_error = saved.error
        if self.trainer.coordinate.rank == 0:
            self.agent_channel.send(CheckpointSaved(**asdict(saved)))
