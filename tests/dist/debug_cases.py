"""What a person needs when something is wrong: hashes of weights, the first layer that is no number, who hangs.

python debug_cases.py all 2 FOLDER
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from cases import PLANS
from loop_cases import StoppingOrders, leave, make_folder, open_trainer
from processes import launch
from real_text import TEXT
from torch import nn

from hpctrain.agent.worker_messages import Report
from hpctrain.base.errors import EXIT_DONE, HpctrainError
from hpctrain.checkpoint.state import fingerprint
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.history.run_log import read_metrics
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import train
from hpctrain.worker.train import failure_of, place_now

HASHED = ["pp2 1f1b", "pp2 interleaved", "dp2 uneven", "tp2"]
STEPS = 3


class Heard(StoppingOrders):
    """Orders that never stop the run and keep what was told last of each kind."""

    def __init__(self) -> None:
        super().__init__(10**6)
        self.told: dict[str, Any] = {}

    def send(self, report: Report) -> None:
        self.told[report.kind] = report


class Site:
    """Run folders, one a case, and the trainers of this rank."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._folder = folder
        self._rank = rank
        self._meeting = dist.FileStore(str(folder / "meeting"), world)
        self._generations = 0

    def open(self, plan: str, run: str = "run") -> Trainer:
        self._generations += 1
        return open_trainer(self._folder / run, PLANS[plan][0], self._generations, None, self._rank, self._meeting)


def hashes(site: Site) -> dict[str, Any]:
    """The hash of the initial weights of each plan, and of the trained ones of the same run, twice."""
    initial, trained = {}, {}
    for name in HASHED:
        orders = Heard()
        for attempt in range(2 if name == "tp2" else 1):
            trainer = site.open(name)
            initial[name] = fingerprint(trainer.pipeline.parameters())
            assert train(trainer, orders) == EXIT_DONE  # type: ignore[arg-type]
            trained[f"{name} {attempt}"] = orders.told["weights"].sha256
            leave()
    row = read_metrics(trainer.folder / "metrics.jsonl")[-1]
    parts = [row.stage_time_s, row.stage_forward_s, row.stage_backward_s]
    return {"initial": initial, "trained": trained, "stage_times": parts}


def divergence(site: Site, rank: int) -> str:
    """Replicas that do not hold the same weights any more."""
    trainer = site.open("dp2 uneven")
    with torch.no_grad():
        dict(trainer.pipeline.parameters())["layers.2.attention.wq.weight"][0, 0] += 1e-3 * rank
    try:
        fingerprint(trainer.pipeline.parameters())
    except HpctrainError as error:
        return str(error)
    finally:
        leave()
    return ""


def broken(site: Site, plan: str, spoil: Callable[[Trainer], None], run: str = "run") -> str:
    """What the training says that ends because of `spoil`; every rank says the same."""
    trainer = site.open(plan, run)
    spoil(trainer)
    said: list[str | None] = [None, None]
    try:
        train(trainer, Heard())  # type: ignore[arg-type]
    except HpctrainError as error:
        dist.all_gather_object(said, str(error))
    assert not any(stage.submod._forward_hooks for stage in trainer.pipeline.stages)
    leave()
    assert said[0] == said[1]
    return str(said[0])


def spoil_weight(trainer: Trainer) -> None:
    """One weight of the last layer, which lies on the second stage."""
    for name, parameter in trainer.pipeline.parameters():
        if name == "layers.3.feed_forward.w2.weight":
            parameter.data[0, 0] = math.inf


def spoil_activation(trainer: Trainer) -> None:
    """What goes into a layer of the second replica, in its second micro-batch of the second step."""
    calls: list[None] = []

    def overflow(_: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        calls.append(None)
        is_it = len(calls) > 2 and trainer.step == 1
        return (inputs[0].masked_fill(torch.ones_like(inputs[0]).cumsum(-1) <= 1, math.nan),) if is_it else inputs

    if trainer.coordinate.dp == 1:
        trainer.pipeline.stages[0].submod.layers["1"].register_forward_pre_hook(overflow)  # type: ignore[index]


def spoil_gradient(trainer: Trainer) -> None:
    """Gradients of two layers; the later one comes first in the backward pass."""
    for name, parameter in trainer.pipeline.parameters():
        if name in ("layers.0.attention.wo.weight", "layers.2.attention.wk.weight"):
            parameter.register_hook(lambda gradient: gradient * math.inf)


def spoil_training(trainer: Trainer) -> None:
    """Two modules without weights: a mask with -inf in it, and one that now and then divides by 0 in training."""

    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x == x.flatten()[0], -math.inf)

    class Dropping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = torch.rand(())
            return x / torch.where(drawn < 0.3, 0, 1) if self.training else x

    for stage in trainer.pipeline.stages:
        block = stage.submod.get_submodule("layers").get_submodule("1")
        block.mask, block.dropping = Mask(), Dropping()
        forward = block.forward

        def changed(x: torch.Tensor, *, block: nn.Module = block, forward: Any = forward) -> torch.Tensor:
            block.mask(x)
            return block.dropping(forward(x))  # type: ignore[no-any-return]

        block.forward = changed  # type: ignore[method-assign]


def spoil_validation(trainer: Trainer) -> None:
    """A layer that gives no number in evaluation alone."""
    block = trainer.pipeline.stages[0].submod.get_submodule("layers.1.feed_forward")
    block.register_forward_hook(lambda module, _, output: output if module.training else output * math.nan)


def sleeping(site: Site, rank: int) -> dict[str, Any]:
    """The second stage sleeps in the forward pass of its second micro-batch; the first one waits for its answer."""
    trainer = site.open("pp2 1f1b", "impatient")
    calls: list[None] = []

    def sleep(*_: object) -> None:
        calls.append(None)
        if len(calls) == 2:
            time.sleep(12)

    if rank == 1:
        trainer.pipeline.stages[0].submod.register_forward_pre_hook(sleep)
    start, said = time.monotonic(), ""
    try:
        train(trainer, Heard())  # type: ignore[arg-type]
    except Exception as error:
        said = failure_of(error).sentence(place_now())
    return {"said": said, "seconds": time.monotonic() - start}


def every_case(folder: Path, rank: int, world: int) -> dict[str, Any]:
    site = Site(folder, rank, world)
    return {
        "hashes": hashes(site),
        "divergence": divergence(site, rank),
        "weight": broken(site, "pp2 1f1b", spoil_weight),
        "activation": broken(site, "dp2 uneven", spoil_activation),
        "gradient": broken(site, "tp2", spoil_gradient),
        "training": broken(site, "dp2 uneven", spoil_training),
        "validation": broken(site, "dp2 uneven", spoil_validation, "validated"),
        # The last one: a process group is of no use after a timeout.
        "sleeping": sleeping(site, rank),
    }


def main(what: str, world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    for name, batches, patience_s in (("run", 0, 120), ("impatient", 0, 4), ("validated", 1, 120)):
        make_folder(folder / name, data)
        path = folder / name / "run.yaml"
        changes = {"validation": {"every": 1, "batches": batches}, "recovery": {"progress_timeout_s": patience_s}}
        run = {**yaml.safe_load(path.read_text()), "steps": STEPS, "deterministic": True, **changes}
        path.write_text(yaml.safe_dump(run))
    launch({"all": every_case}[what], world, str(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
