"""Training in fp16 with the worker's own loop: overflow, recovery, resume. Called by the test beside it.

python scale_cases.py all 2 FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import EVEN, PLANS, WHOLE, changed, deviation, make_plan, whole
from loop_cases import MODEL, StoppingOrders, leave, make_folder, open_trainer
from processes import largest, launch
from real_text import TEXT

from hpctrain.base.errors import HpctrainError
from hpctrain.checkpoint.published import newest
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.history.manifest import LossScale
from hpctrain.records.history.run_log import MetricRow, last_row_of_each_step, read_metrics
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import train

STEPS, HALF_WAY = 8, 4
TOO_LARGE = 2.0**20
"""The gradients of the matrix products overflow (fp16 ends at 65504) until it is halved a few times."""

ROTATED = CodecSpec(codec=make_codec({"mode": "rotated_int3"}))
WIDE = MODEL.model_copy(update={"dim": 64})
TIED = MODEL.model_copy(update={"tied": True})
FORMS = {
    "dp2, recomputed": (changed("dp2 uneven", ("selective",)), MODEL),
    "tp2 sequence, tied": (PLANS["tp2 sequence, two stages, tied"][0], TIED),
    "pp2 V, tied": (PLANS["pp2 V tied"][0], TIED),
    **{
        f"dp2, zero {zero}, rotated_int3": (make_plan(1, 2, 1, WHOLE, EVEN, zero=zero, compression=[ROTATED]), WIDE)
        for zero in (0, 2)
    },
}


def run_until(trainer: Trainer, last: int) -> dict[str, torch.Tensor]:
    """Train up to a step; the parameters then."""
    train(trainer, StoppingOrders(last))  # type: ignore[arg-type]
    return {name: parameter.detach().clone() for name, parameter in trainer.pipeline.parameters()}


def scaled(place: Path, last: int, rank: int, meeting: dist.Store) -> tuple[dict[str, torch.Tensor], float]:
    """Parameters after so many steps that start with a scale far too large, and how far they moved."""
    trainer = open_trainer(place, PLANS["pp2 uneven"][0], 0, None, rank, meeting)
    assert trainer.scaler is not None
    trainer.scaler.state = LossScale(value=TOO_LARGE)
    start = {name: parameter.detach().clone() for name, parameter in trainer.pipeline.parameters()}
    end = run_until(trainer, last)
    moved = largest([deviation(end[name], start[name]) for name in start])
    leave()
    return end, moved


def overflowing(folder: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Once a single step, once straight through, once resumed from a checkpoint half way."""
    _, moved = scaled(folder / "first", 1, rank, meeting)
    straight, learned = scaled(folder / "straight", STEPS, rank, meeting)
    scaled(folder / "resumed", HALF_WAY, rank, meeting)
    restore = f"checkpoints/step-{HALF_WAY:08}"
    resumed = run_until(open_trainer(folder / "resumed", PLANS["pp2 uneven"][0], 1, restore, rank, meeting), STEPS)
    apart = largest([deviation(resumed[name], straight[name]) for name in straight])
    leave()
    found, _ = newest(folder / "straight" / "checkpoints")
    assert found is not None
    assert found.manifest.loss_scale is not None
    return {
        "moved": moved,
        "learned": learned,
        "apart": apart,
        "saved": found.manifest.loss_scale.model_dump(),
        "straight": summary(folder / "straight"),
        "resumed": summary(folder / "resumed"),
    }


def summary(folder: Path) -> list[list[float | bool | None]]:
    """Scale, whether skipped, norm and loss of each step."""
    rows: list[MetricRow] = last_row_of_each_step(read_metrics(folder / "metrics.jsonl"))
    return [[row.loss_scale, row.skipped, row.grad_norm, row.loss] for row in rows]


def form(folder: Path, name: str, plan: Plan, rank: int, meeting: dist.Store) -> dict[str, float]:
    """The loss of the third step in fp16 and in fp32, none of which overflowed, and how far this
    rank's weights are apart."""
    losses, weights = {}, {}
    for half in ("fp16", "fp32"):
        place = folder / f"{half} {name}"
        trained = run_until(open_trainer(place, plan, 0, None, rank, meeting), 3)
        weights[half] = {key: whole(parameter) for key, parameter in trained.items()}
        leave()
        rows = last_row_of_each_step(read_metrics(place / "metrics.jsonl"))
        assert not any(row.skipped for row in rows)
        losses[half] = rows[-1].loss
    apart = max(deviation(weights["fp16"][key], weights["fp32"][key]) for key in weights["fp32"])
    return {**losses, "apart": apart}


def no_number(folder: Path, rank: int, meeting: dist.Store) -> str:
    """Weights that are no numbers: nothing that a smaller scale could help."""
    trainer = open_trainer(folder / "nan", PLANS["pp2 uneven"][0], 0, None, rank, meeting)
    if rank == 1:
        with torch.no_grad():
            trainer.parameters[0].fill_(torch.nan)
    said = ""
    try:
        run_until(trainer, STEPS)
    except HpctrainError as error:
        said = str(error)
    leave()
    return said


def every_case(folder: Path, rank: int, world: int) -> dict[str, Any]:
    meeting = dist.FileStore(str(folder / "meeting"), world)
    losses = {name: form(folder, name, plan, rank, meeting) for name, (plan, _) in FORMS.items()}
    return {
        "overflow": overflowing(folder, rank, meeting),
        "losses": losses,
        "nan": no_number(folder, rank, meeting),
    }


def main(what: str, world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    still = {"validation": {"every": STEPS, "batches": 0}, "checkpoint": {"every": HALF_WAY, "keep": 2}}
    for name in ("first", "straight", "resumed", "nan"):
        make_folder(folder / name, data, precision="fp16", steps=STEPS, **still)
    for name, (_, spec) in FORMS.items():
        for half in ("fp16", "fp32"):
            dims = {"dims": spec.model_dump(exclude_none=True)}
            make_folder(folder / f"{half} {name}", data, precision=half, model=dims, **still)
    launch({"all": every_case}[what], world, str(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
