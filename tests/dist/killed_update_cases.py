"""Processes that are killed while they update a state in memory, and another process that finishes the update. Called
by the test beside it.

python killed_update_cases.py all 1 FOLDER
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.memory.live_state import LiveState, SegmentOwner
from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import Control, StepVerdict, held_state
from hpctrain.checkpoint.memory.update import BucketedUpdate, finish
from hpctrain.checkpoint.state import prepare_moments
from hpctrain.records.history.manifest import LossScale

SHAPES = [(90, 110), (3000,), (17,), (64, 50), (1,)]
BUCKET = 1 << 14
MARKS = [
    (Control, "set_gradients"), (Control, "set_norm"), (Control, "set_cursor"), (Control, "set_state"),
    (Control, "write_slot"), (Control, "write_verdict"), (MappedSegment, "remember"), (MappedSegment, "undo"),
]  # fmt: skip
"""What a process does between two of which it may be killed."""


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(1)
    return [(f"p{index}", nn.Parameter(torch.randn(shape))) for index, shape in enumerate(SHAPES)]


def adam(named: list[tuple[str, nn.Parameter]], fused: bool) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=fused)
    prepare_moments(named, optimizer)
    return optimizer


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(shape) for shape in SHAPES]


def verdict(step: int, overflow: bool) -> StepVerdict:
    scale = LossScale(value=2.0**10, good_steps=step)
    return StepVerdict(math.inf, 1e-2, scale.after_overflow()) if overflow else StepVerdict(3.0 + step, 1e-2, scale)


class Killer:
    """Kills this process at one point: before or after a mark, or in the middle of a bucket."""

    def __init__(self, at: int, torn: bool = False) -> None:
        self.points = 0
        self._at, self._torn = at, torn
        for owner, name in MARKS:
            setattr(owner, name, self._around(getattr(owner, name)))
        if torn:
            BucketedUpdate._update = self._tear(BucketedUpdate._update)  # type: ignore[method-assign]

    def _point(self) -> None:
        self.points += 1
        if self.points == self._at and not self._torn:
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, act: Callable[..., None]) -> Callable[..., None]:
        def marked(*args: Any) -> None:
            self._point()
            act(*args)
            self._point()

        return marked

    def _tear(self, act: Callable[..., None]) -> Callable[..., None]:
        def torn(updating: BucketedUpdate, number: int, *args: Any) -> None:
            bucket, segment = updating.buckets[number], updating._segment
            act(updating, number, *args)
            if number == self._at:
                middle = (bucket.start + bucket.end) // 2
                for region in ("model", "exp_avg"):
                    start = segment.header.region(region)
                    segment._bytes[start + middle : start + bucket.end] = 85
                os.kill(os.getpid(), signal.SIGKILL)

        return torn


def one_step(descriptor: int, fused: bool, overflow: bool, commit_only: bool = False) -> None:
    """Step 1 whole, then step 2; step 2 is where the process may be killed."""
    named = parameters()
    optimizer = adam(named, fused)
    live = LiveState.fill(descriptor, SegmentOwner(0, 0, "0" * 64), named, optimizer, 2.0, {}, BUCKET)
    live.commit(0, LossScale(), {})
    for step in (1,) if commit_only else (1, 2):
        if step == 2:
            KILL[0]()
        grads = gradients(step)
        live.keep_gradients(step, grads, {"residual.0": torch.full((7,), float(step))})
        live.update(step, verdict(step, overflow and step == 2), grads)


KILL: list[Callable[[], Any]] = [lambda: None]


def forked(act: Callable[[], None]) -> bool:
    """Run it in a process of its own; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def content(descriptor: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MappedSegment(descriptor).tensors().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference(fused: bool, overflow: bool) -> dict[str, Tensor]:
    """The same two steps by torch alone, in memory of this process."""
    named = parameters()
    optimizer = adam(named, fused)
    for step in (1, 2):
        known = verdict(step, overflow and step == 2)
        if not math.isfinite(known.norm):
            continue
        for (_, parameter), gradient in zip(named, gradients(step), strict=True):
            parameter.grad = gradient
        factor = (2.0 / (torch.tensor(known.norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for _, p in named if p.grad is not None], factor)
        for group in optimizer.param_groups:
            group["lr"] = known.lr
        optimizer.step()
    return {
        **{f"model.{name}": p.detach() for name, p in named},
        **{f"{m}.{name}": optimizer.state[p][m] for name, p in named for m in ("exp_avg", "exp_avg_sq")},
    }


def case(fused: bool, overflow: bool) -> dict[str, Any]:
    before, after = os.memfd_create("before"), os.memfd_create("after")
    forked(lambda: one_step(before, fused, overflow, commit_only=True))
    forked(lambda: one_step(after, fused, overflow))
    first, second = content(before), content(after)
    found: dict[str, Any] = {"wrong": [], "old": 0, "finished": 0, "torn": 0, "finished twice": 0}
    found["buckets"] = len(BucketedUpdate(MappedSegment(after)).buckets)
    if not equal(second, reference(fused, overflow)):
        found["wrong"].append("not killed")
    for torn in (False, True):
        at = 0 if torn else 1
        while True:
            descriptor = os.memfd_create("killed")

            def plant(at: int = at, torn: bool = torn) -> None:
                KILL[0] = lambda: Killer(at, torn)

            def act(descriptor: int = descriptor, plant: Callable[[], None] = plant) -> None:
                plant()
                one_step(descriptor, fused, overflow)

            if not forked(act):
                break
            where = f"{'bucket' if torn else 'point'} {at}"
            check(descriptor, where, first, second, verdict(2, overflow), found)
            found["torn"] += torn
            at += 1
    return found


def check(
    descriptor: int, where: str, first: dict[str, Tensor], second: dict[str, Tensor], known: StepVerdict, found: Any
) -> None:
    """Whether a killed process left the state of a step, or one that can be finished."""
    held = held_state(descriptor)
    assert held is not None
    if held.step == 1 and not held.finishable:
        found["old"] += 1
        found["wrong"] += [] if equal(content(descriptor), first) else [where]
        return
    # A process that finishes may be killed, too.
    found["finished twice"] += forked(lambda: finish_killed(descriptor, known))
    segment = MappedSegment(descriptor)
    outcome = finish(segment, 2, known)
    right = equal(content(descriptor), second) and outcome == known and held_state(descriptor).step == 2  # type: ignore[union-attr]
    right &= torch.equal(segment.read_slot(2)[0]["residual.0"], torch.full((7,), 2.0))
    found["finished"] += 1
    found["wrong"] += [] if right else [where]


def finish_killed(descriptor: int, known: StepVerdict) -> None:
    Killer(7)
    finish(MappedSegment(descriptor), 2, known)


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"fused": case(True, False), "not fused": case(False, False), "overflow": case(True, True)}))


if __name__ == "__main__":
    main()
