"""A run that is stopped and resumed beside one that is not. Called by the test beside it.

python resume_cases.py all 2 FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import HALF, PLANS, WHOLE, make_plan
from loop_cases import StoppingOrders, leave, make_folder, open_trainer
from processes import largest, launch
from real_text import TEXT

from hpctrain.checkpoint.state import collect
from hpctrain.compress.reducers.reducer import DenseReducer
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.parallel import gradient_reducer
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import train

HALFWAY, END = 3, 6
SAME: dict[str, Plan] = {name: PLANS[name][0] for name in ("dp2 uneven", "pp2 V", "tp2")}
DP2, PP2 = make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)]), make_plan(2, 1, 1, HALF, [(2, 4)])
PLAIN, MOVED = "dp2 without dropout", "dp2, then pp2"


def add_dropout(trainer: Trainer) -> None:
    """What every stage gives is thinned out, as a user's model may do it."""
    for stage in trainer.pipeline.stages:
        stage.submod.register_forward_hook(lambda module, _, out: F.dropout(out, 0.2, module.training))


class Departures:
    """Counts the buckets of gradients that leave while the only stage still works, and those that leave when its
    gradients are complete."""

    def __init__(self, trainer: Trainer) -> None:
        self.early, self.late, self._working = 0, 0, False
        self._step, self._send = trainer.pipeline.step, dist.all_reduce
        trainer.pipeline.step = self.step  # type: ignore[method-assign]
        (self._stage,) = trainer.pipeline.stages
        self._complete, self._stage.backward_done = self._stage.backward_done, self.complete
        dist.all_reduce = self.all_reduce

    def step(self, *rows: torch.Tensor) -> float:
        self._working = True
        return self._step(*rows)

    def complete(self) -> None:
        self._working = False
        self._complete()

    def all_reduce(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        self.early += async_op and self._working
        self.late += async_op and not self._working
        return self._send(*args, async_op=async_op, **kwargs)

    def end(self) -> None:
        dist.all_reduce = self._send


def departures(place: Path, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Replicas of unequal share whose gradients travel in many buckets."""
    with patch.object(gradient_reducer, "build_reducer", lambda group, *_: DenseReducer(group, bucket_bytes=8192)):
        trainer = open_trainer(place, SAME["dp2 uneven"], 0, None, rank, meeting)
    add_dropout(trainer)
    seen = Departures(trainer)
    train(trainer, StoppingOrders(END))  # type: ignore[arg-type]
    seen.end()
    leave()
    losses = [row.loss for row in last_row_of_each_step(read_metrics(place / "metrics.jsonl"))]
    return {"losses": losses, "early": seen.early, "late": seen.late}


def run(place: Path, parts: list[tuple[Plan, int]], dropout: bool, rank: int, meeting: dist.Store) -> dict[str, Any]:
    """Train in these parts, each from the checkpoint of the one before; losses and the state of this rank."""
    step = 0
    for generation, (plan, last) in enumerate(parts):
        restore = f"checkpoints/step-{step:08}" if step else None
        # A process that starts anew has drawn other numbers before.
        torch.manual_seed(1000 + generation)
        trainer = open_trainer(place, plan, generation, restore, rank, meeting)
        if dropout:
            add_dropout(trainer)
        train(trainer, StoppingOrders(last))  # type: ignore[arg-type]
        step = trainer.step
        state = {name: t.to_local() if plan.tp > 1 and hasattr(t, "to_local") else t for name, t in state_of(trainer)}
        if last < END:
            leave()
    rows = last_row_of_each_step(read_metrics(place / "metrics.jsonl"))
    return {
        "losses": [row.loss for row in rows],
        "valid": [row.valid_loss for row in rows if row.valid_loss is not None],
        "state": state,
        "again": validated_twice(trainer),
    }


def state_of(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return list(collect(trainer.pipeline.parameters(), trainer.optimizer).items())


def validated_twice(trainer: Trainer) -> bool:
    """Whether a validation draws nothing: it gives the same in another step. Ends the trainer."""
    first, count = trainer.rows
    batch = trainer.train.batch(0, first, count)
    found = []
    for step in (100, 200):
        trainer.pipeline.random.step = step
        found.append(trainer.pipeline.evaluate(*batch))
    leave()
    return found[0] == found[1]


def both(folder: Path, name: str, parts: list[tuple[Plan, int]], dropout: bool, rank: int, meeting: Any) -> Any:
    """The run in these parts, and the one in one go on the first part's plan."""
    straight = run(folder / f"{name}, straight", [(parts[0][0], END)], dropout, rank, meeting)
    return straight, run(folder / f"{name}, resumed", parts, dropout, rank, meeting)


def gathered(values: list[float]) -> float:
    """`largest` needs a group, and each trainer has ended its own."""
    dist.init_process_group("gloo", store=dist.PrefixStore("gathered", MEETING[0]), rank=MEETING[1], world_size=2)
    found = largest(values)
    leave()
    return found


MEETING: list[Any] = []


def every_case(folder: Path, rank: int, world: int) -> dict[str, Any]:
    meeting = dist.FileStore(str(folder / "meeting"), world)
    results: dict[str, Any] = {}
    unequal: list[float] = []
    for name, plan in SAME.items():
        straight, resumed = both(folder, name, [(plan, HALFWAY), (plan, END)], True, rank, meeting)
        unequal += [float(not torch.equal(t, resumed["state"][key])) for key, t in straight["state"].items()]
        results[name] = {key: straight[key] == resumed[key] for key in ("losses", "valid")}
        results[name]["valid is quiet"] = straight["again"]
        results[name]["losses"] &= len(straight["losses"]) == END
        first = straight["losses"]
        if name == "dp2 uneven":
            results["departures"] = departures(folder / "departures", rank, meeting)
            results["departures"]["expected"] = first
    straight, resumed = both(folder, PLAIN, [(DP2, HALFWAY), (PP2, END)], False, rank, meeting)
    pairs = zip(straight["losses"], resumed["losses"], strict=True)
    results[MOVED] = {"loss": max(abs(b / a - 1) for a, b in pairs), "draws": first[0] != straight["losses"][0]}
    MEETING[:] = [meeting, rank]
    results["states"] = {"unequal": gathered(unequal), "compared": len(unequal)}
    return results


def main(world: int, folder: Path) -> None:
    data = folder / "data"
    prepare([TEXT], data, PrepareOptions(valid_fraction=0.1, limit_bytes=200_000))
    for name in (*SAME, PLAIN):
        make_folder(folder / f"{name}, straight", data)
        make_folder(folder / f"{name}, resumed", data)
    make_folder(folder / "departures", data)
    launch(every_case, world, str(folder))


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[3]))
