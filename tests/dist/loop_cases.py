"""The worker's own training loop, on several plans, against a plain loop in torch. Called by the tests beside it.

python loop_cases.py all 1 FOLDER
python loop_cases.py all 2 FOLDER   further cases of two stages
"""

from __future__ import annotations

import math
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from cases import HALF, PLANS, ROWS, SEED, SEQ, SPEC, WHOLE, deviation, make_plan
from processes import largest, launch
from real_text import TEXT

from hpctrain.agent.worker_messages import MemoryOrder, Report, StartOrder, StepDone, StoreConnection
from hpctrain.base.errors import EXIT_RESUMABLE, HpctrainError
from hpctrain.checkpoint.published import newest
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.model.build import build_stage, initialise
from hpctrain.records.history.rank_log import read_rank_log
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import ProfilerSettings
from hpctrain.worker.agent_channel import Ending
from hpctrain.worker.build import Trainer, build
from hpctrain.worker.loop import train

STEPS, RUN_STEPS, WARMUP = 5, 20, 2
LR, CLIP, DECAY, EPS, BETAS = 1e-3, 0.25, 1.0, 1e-2, (0.9, 0.95)
"""The large eps lets the size of the gradient, and so clipping, reach the parameters."""
EVERY, BATCHES = 2, 2
MODEL = SPEC.model_copy(update={"vocab": 320})

CASES: dict[str, list[tuple[Plan, int]]] = {
    "one": [(make_plan(1, 1, 1, WHOLE, [(8, 1)]), STEPS)],
    "two stages": [(make_plan(1, 1, 1, HALF, [(2, 4)], "interleaved_1f1b"), STEPS)],
    "dp2 uneven": [(PLANS["dp2 uneven"][0], STEPS)],
    "pp2 uneven": [(PLANS["pp2 uneven"][0], STEPS)],
    "pp2 V": [(PLANS["pp2 V"][0], STEPS)],
    "tp2": [(PLANS["tp2"][0], STEPS)],
    "pp2, then tp2 from its checkpoint": [(PLANS["pp2 1f1b"][0], 3), (PLANS["tp2"][0], STEPS)],
    "zero3, then zero1 from its checkpoint": [(PLANS["zero3 dp2"][0], 3), (PLANS["zero1 dp2 counts"][0], STEPS)],
}
"""Each generation of a case: its plan and the step after which it is stopped."""


class StoppingOrders:
    """Orders of an agent that ends the generation after a step."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._done = 0

    def stop_wanted(self) -> bool:
        return self._done + 1 >= self._last

    def ending(self) -> Ending:
        return Ending.STOP if self.stop_wanted() else Ending.NONE

    def send(self, report: Report) -> None:
        if isinstance(report, StepDone):
            self._done = report.step


class NoCorpus:
    """Validation data that cannot be read."""

    def batch(self, *_: object) -> NoReturn:
        raise OSError("the validation data is gone")


def make_folder(folder: Path, data: Path, **changes: Any) -> None:
    """A run folder without its plans, with other values in run.yaml where told."""
    folder.mkdir()
    run = {
        "steps": RUN_STEPS,
        "seed": SEED,
        "model": {"dims": MODEL.model_dump(exclude_none=True)},
        "data": {"train": [str(data)], "seq_len": SEQ},
        "batch": {"global": ROWS},
        "optimizer": {
            "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY,
            "warmup_steps": WARMUP, "decay": "cosine", "clip_norm": CLIP,
        },
        "checkpoint": {"every": EVERY, "keep": 2},
        "validation": {"every": EVERY, "batches": BATCHES},
        **changes,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def open_trainer(
    folder: Path,
    plan: Plan,
    generation: int,
    restore: str | None,
    rank: int,
    meeting: dist.Store,
    memory: MemoryOrder | None = None,
) -> Trainer:
    """What the worker's process builds from its start order; the order is made here as an agent makes it."""
    name, key = f"plan-{generation}.json", f"{folder.name}-{generation}"
    descriptor = None
    if rank == 0:
        plan.write(folder / name)
        server = socket.create_server(("127.0.0.1", 0))
        meeting.set(key, str(server.getsockname()[1]))
        descriptor = server.detach()
    port = int(meeting.get(key))
    store = StoreConnection(addr="127.0.0.1", port=port, secret="test", fd=descriptor)
    order = StartOrder(plan=name, rank=rank, generation=generation, store=store, restore=restore, memory=memory)
    return build(folder, order)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def plain_loop(data: Path) -> dict[str, Any]:
    """The same training without any of hpctrain's wiring; model and corpus are tested elsewhere."""
    corpus, valid = Corpus.open([str(data)], "train", SEQ), Corpus.open([str(data)], "valid", SEQ)
    model = build_stage(MODEL, 0, MODEL.layers, SEED)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, RUN_STEPS - WARMUP, eta_min=0.1 * LR)
    rates = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [WARMUP])

    def loss_of(rows: Any) -> torch.Tensor:
        tokens = torch.from_numpy(rows)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    rows: list[dict[str, float]] = []
    for step in range(STEPS):
        loss = loss_of(corpus.rows(SEED, step * ROWS, ROWS))
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        assert norm > 1.2 * CLIP, f"step {step} would not be clipped: {norm}"
        rows.append({"loss": float(loss.detach()), "norm": norm, "lr": optimizer.param_groups[0]["lr"]})
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                losses = [float(loss_of(valid.rows(0, batch * ROWS, ROWS))) for batch in range(BATCHES)]
            rows[-1]["valid"] = sum(losses) / BATCHES
    return {"rows": rows, "parameters": dict(model.named_parameters())}


def compare(folder: Path, trainer: Trainer, expected: dict[str, Any]) -> dict[str, Any]:
    """Deviations of the metrics and of the parameters from the plain loop."""
    done = last_row_of_each_step(read_metrics(folder / "metrics.jsonl"))
    assert [row.step for row in done] == list(range(1, STEPS + 1))
    pairs = list(zip(done, expected["rows"], strict=True))
    assert [row.valid_loss is None for row in done] == ["valid" not in row for row in expected["rows"]]
    named = trainer.pipeline.parameters()
    return {
        "loss": largest([abs(row.loss - other["loss"]) for row, other in pairs]),
        "norm": largest([abs(row.grad_norm / other["norm"] - 1) for row, other in pairs]),
        "lr": largest([abs(row.lr / other["lr"] - 1) for row, other in pairs]),
        "valid": largest([abs(row.valid_loss - other["valid"]) for row, other in pairs if row.valid_loss is not None]),
        "parameter": largest([deviation(p, expected["parameters"][name]) for name, p in named]),
        "bubble": [row.bubble_fraction for row in done],
    }


def training(folder: Path, rank: int, world: int, meeting: dist.Store) -> dict[str, Any]:
    """Every case of that many ranks."""
    expected = plain_loop(folder / "data")
    results = {}
    for name, generations in CASES.items():
        if generations[0][0].world_size != world:
            continue
        place, step = folder / name, 0
        for generation, (plan, last) in enumerate(generations):
            restore = f"checkpoints/step-{step:08}" if step else None
            with mock.patch("hpctrain.model.build.initialise", wraps=initialise) as draws:
                trainer = open_trainer(place, plan, generation, restore, rank, meeting)
            # Weights that a checkpoint replaces are not drawn first: after a fault, everybody would wait for it.
            assert draws.called == (restore is None)
            assert trainer.step == step
            assert train(trainer, StoppingOrders(last)) == EXIT_RESUMABLE  # type: ignore[arg-type]
            step = trainer.step
            if step == STEPS:
                results[name] = compare(place, trainer, expected)
            leave()
    return results


def failing(folder: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """A validation that fails at the step of a checkpoint."""
    place = folder / "failing"
    trainer = open_trainer(place, PLANS["pp2 1f1b"][0], 0, None, rank, meeting)
    trainer.valid = {"": NoCorpus()}  # type: ignore[dict-item]
    said = ""
    try:
        train(trainer, StoppingOrders(STEPS))  # type: ignore[arg-type]
    except OSError as error:
        said = str(error)
    leave()
    found, _ = newest(place / "checkpoints")
    steps = [row.step for row in read_metrics(place / "metrics.jsonl")]
    return {"said": said, "saved": found.manifest.step if found else None, "steps": steps}


def ruined(folder: Path, rank: int, meeting: dist.Store) -> str:
    """The update of the second step leaves weights that are no numbers; loss and gradient of the step were some."""
    trainer = open_trainer(folder / "ruined", PLANS["pp2 1f1b"][0], 0, None, rank, meeting)

    def ruin(*_: object) -> None:
        if trainer.step == 1:
            for parameter in trainer.parameters:
                parameter.data.fill_(math.nan)

    trainer.optimizer.register_step_post_hook(ruin)
    said = ""
    try:
        train(trainer, StoppingOrders(STEPS))  # type: ignore[arg-type]
    except HpctrainError as error:
        said = str(error)
    leave()
    return said


def bubble(folder: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Two stages whose forward takes 0.3 s and whose backward 0.6 s: they sleep, so a busy machine matters little, and
    of three steps the middle one counts."""
    place = folder / "bubble"
    trainer = open_trainer(place, PLANS["pp2 one micro-batch"][0], 0, None, rank, meeting)
    for stage in trainer.pipeline.stages:
        stage.submod.register_forward_pre_hook(lambda *_: time.sleep(0.3))
        stage.submod.register_full_backward_pre_hook(lambda *_: time.sleep(0.6))
    train(trainer, StoppingOrders(4))  # type: ignore[arg-type]
    leave()
    rows = sorted(read_metrics(place / "metrics.jsonl")[-3:], key=lambda row: row.bubble_fraction or 0)
    return {"measured": rows[1].bubble_fraction, "stage_time_s": rows[1].stage_time_s, "step_s": rows[1].step_time_s}


def slow_rank(folder: Path, rank: int, meeting: dist.Store) -> list[dict[str, Any]]:
    """Two replicas, of which the second sleeps 0.3 s in each forward pass; and the rows of the whole job."""
    place = folder / "slow_rank"
    trainer = open_trainer(place, PLANS["dp2 uneven"][0], 0, None, rank, meeting)
    trainer.run = trainer.run.model_copy(update={"profile": ProfilerSettings(layers=True)})
    if rank == 1:
        trainer.pipeline.stages[0].submod.register_forward_pre_hook(lambda *_: time.sleep(0.3))
    train(trainer, StoppingOrders(12))  # type: ignore[arg-type]
    leave()
    times = [row.stage_forward_s or [] for row in read_metrics(place / "metrics.jsonl")[6:11]]
    whole = {"forward_s": sum(forward for (forward,) in times) / 5}
    return [*(row.to_json() for row in read_rank_log(place)), whole]


def every_case(folder: Path, rank: int, world: int) -> dict[str, Any]:
    # One for all: the last rank that lets go of a store removes its file, in which others may already meet again.
    meeting = dist.FileStore(str(folder / "meeting"), world)
    results: dict[str, Any] = {"training": training(folder, rank, world, meeting)}
    if world > 1:
        results |= {body.__name__: body(folder, rank, meeting) for body in (failing, ruined, bubble, slow_rank)}
    return results


def main(world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    for name in [*CASES, "failing", "ruined", "bubble", "slow_rank"]:
        make_folder(folder / name, data)
    launch(every_case, world, str(folder))


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[3]))
