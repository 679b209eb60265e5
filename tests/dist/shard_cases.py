"""What sharding is for: memory that falls with the number of shards, and the bytes that it costs.

python shard_cases.py two 2 FOLDER     memory and traffic of each ZeRO level on two replicas
python shard_cases.py four 4 FOLDER    hybrid sharding, and bf16 on a pipeline
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import EVEN, FOUR, HALF, SEED, SEQ, SPEC, WHOLE, batch, deviation, job_loss, make_plan, my_rows, whole
from gloo_calls import early_sums, sums_and_actions
from processes import largest, launch, process_group
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from traffic_cases import reported_bytes

from hpctrain.base.activity import ACTIVITY
from hpctrain.checkpoint.state import collect, prepare_moments
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.model.build import build_stage
from hpctrain.parallel.early_sums import Early
from hpctrain.parallel.gradient_reducer import build_plan_reducer
from hpctrain.parallel.gradients import local_gradients
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.schedule.resolve import schedule_of

WIDE = SPEC.model_copy(update={"dim": 64, "vocab": 320})
LATE_S = 1.5
"""Seconds by which ranks are late: longer than a step takes on a busy machine."""


def open_plan(
    plan: Plan, rank: int, compute: torch.dtype | None = None, early: Early = "faster", spec: DecoderSpec = SPEC
) -> tuple[Pipeline, Coordinate, Reducer]:
    coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, "cpu")
    schedule, _ = schedule_of(plan, coordinate.dp)
    inputs = PipelineInputs(plan, spec, schedule, SEQ, SEED, torch.device("cpu"), compute)
    pipeline = build_pipeline(inputs, mesh, coordinate)
    return pipeline, coordinate, build_plan_reducer(plan, mesh, pipeline, early)


def model_bytes() -> int:
    return live_bytes(list(build_stage(SPEC, 0, SPEC.layers, SEED).parameters()))


def live_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece of memory once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in local}.values())


class Witness:
    """Bytes of whole weights and whole gradients that live in this process: at the start of each forward (`between`)
    and when the backward pass comes to a block (`within`). Under sharding, plain parameters are gathered ones.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.between: list[tuple[int, int]] = []
        self.within: list[tuple[int, int]] = []
        stage.register_forward_pre_hook(lambda *_: self.between.append(self._look()), prepend=True)
        for block in stage.layers.children():  # type: ignore[union-attr]
            block.register_forward_hook(self._watch)

    def _watch(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.within.append(self._look()))

    def _look(self) -> tuple[int, int]:
        places = [item for item in gc.get_objects() if type(item) is nn.Parameter]
        return live_bytes(places), live_bytes([place.grad for place in places if place.grad is not None])


def memory(zero: int, rank: int) -> dict[str, Any]:
    """Shares of the whole model's bytes that one of two replicas holds: [weights, gradients] for what is whole."""
    gc.collect()
    size = model_bytes()
    plan = make_plan(1, 2, 1, WHOLE, EVEN, zero=zero)
    pipeline, coordinate, _ = open_plan(plan, rank)
    named = pipeline.parameters()
    optimizer = torch.optim.AdamW([p for _, p in named], foreach=True)
    prepare_moments(named, optimizer)
    witness = Witness(pipeline.stages[0].submod)
    pipeline.step(*my_rows(plan, coordinate, batch(SPEC, 0)))
    optimizer.step()
    state = collect(pipeline.parameters(), optimizer)
    weights = [name for name in state if name.startswith("model.")]
    return {
        "weights": live_bytes([state[name] for name in weights]) / size,
        "moments": live_bytes([state[name] for name in state.keys() - weights]) / size,
        "gradients": live_bytes([p.grad for _, p in named if p.grad is not None]) / size,
        "between": [value / size for value in witness.between[1]],
        "within": [max(values) / size for values in zip(*witness.within, strict=True)],
    }


def counted_bytes(plan: Plan, rank: int, compute: torch.dtype | None = None) -> float:
    """Bytes that a rank sends in a step, by the reducer, as a share of the whole model's."""
    pipeline, coordinate, reducer = open_plan(plan, rank, compute)
    pipeline.step(*my_rows(plan, coordinate, batch(SPEC, 0)))
    return reducer.reduce(local_gradients([p for _, p in pipeline.parameters()])) / model_bytes()


def traffic(plan: Plan, rank: int) -> dict[str, float]:
    """As `counted_bytes`, and by gloo's own report."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        counted = counted_bytes(plan, rank)
    return {"counted": counted, "reported": reported_bytes(trace) / model_bytes()}


def half_precision(zero: int, rank: int) -> dict[str, Any]:
    """A step in bf16 on a pipeline, beside the same plan without sharding: relative deviation of the gradient, and the
    precision of what is sent between stages, of gradients and of weights."""
    results = []
    for level in (0, zero):
        plan = make_plan(2, 2, 1, HALF, EVEN, zero=level)
        pipeline, coordinate, reducer = open_plan(plan, rank, torch.bfloat16)
        sent: list[torch.dtype] = []
        pipeline.stages[0].submod.register_forward_hook(lambda _m, _i, out, sent=sent: sent.append(out.dtype))
        loss = job_loss(float(pipeline.step(*my_rows(plan, coordinate, batch(SPEC, 0)))), coordinate)
        parameters = [p for _, p in pipeline.parameters()]
        reducer.reduce(local_gradients(parameters))
        results.append((loss, sent, parameters, [whole(p.grad) for p in parameters]))
    (plain_loss, plain_sent, _, expected), (loss, sent, parameters, found) = results
    size = torch.cat([grad.flatten() for grad in expected]).abs().max()
    return {
        "loss": largest([abs(loss - plain_loss)]),
        "gradient": largest([deviation(a, b) / float(size) for a, b in zip(found, expected, strict=True)]),
        "same dtypes": sent == plain_sent and {p.grad.dtype for p in parameters} == {torch.float32},
    }


@contextlib.contextmanager
def watched(places: Counter[tuple[str, bool]]) -> Iterator[None]:
    """Looks at what this process does many times while the block runs, as its agent would."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            places[ACTIVITY.now.operation, ACTIVITY.now.waits] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    yield
    over.set()
    watcher.join()


def delay(pipeline: Pipeline, where: str) -> None:
    """Let this rank be late once, at one place of the step to come."""
    stage = pipeline.stages[0]
    block = stage.submod.get_submodule("layers.1")
    pauses = [LATE_S]

    def pause(*_: object) -> None:
        if pauses:
            time.sleep(pauses.pop())

    if where == "end":
        finish = stage.perform_reduce_grad
        stage.perform_reduce_grad = lambda factor: (pause(), finish(factor))  # type: ignore[method-assign]
    elif where == "forward":
        block.register_forward_pre_hook(pause, prepend=True)
    else:
        block.register_forward_hook(lambda _module, _inputs, output: output.register_hook(pause) and None)


def waiting(plan: Plan, rank: int, late: tuple[int, ...], where: str) -> tuple[str, bool]:
    """Where rank 0 stood the longest in a step in which others were late, and whether it said that it waits."""
    pipeline, coordinate, reducer = open_plan(plan, rank)
    rows = my_rows(plan, coordinate, batch(SPEC, 0))
    places: Counter[tuple[str, bool]] = Counter()
    dist.barrier()
    if rank in late and where == "start":
        time.sleep(LATE_S)
    elif rank in late:
        delay(pipeline, where)
    with watched(places):
        pipeline.step(*rows)
        reducer.reduce(local_gradients([p for _, p in pipeline.parameters()]))
    return places.most_common(1)[0][0]


def between_pairs(zero: int, codec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Steps of two pairs whose copies are summed as soon as possible, beside steps in which they are summed last: how
    many more sums begin before the end of the last action, and how many gradients differ."""
    plan = make_plan(1, 4, 1, WHOLE, FOUR, zero=zero, shard=2, compression=[CodecSpec.model_validate({"codec": codec})])
    grads: list[list[Tensor]] = []
    begun: list[list[int]] = []
    for late in (True, False):
        pipeline, coordinate, reducer = open_plan(plan, rank, early="always", spec=WIDE)
        reducer.defer(late)
        begun.append([])
        grads.append([])
        for step in range(3):
            with sums_and_actions(pipeline) as events:
                pipeline.step(*my_rows(plan, coordinate, batch(WIDE, step)))
            reducer.reduce(local_gradients([p for _, p in pipeline.parameters()]))
            begun[-1].append(early_sums(events))
            grads[-1] += [whole(p.grad) for _, p in pipeline.parameters()]
            for _, parameter in pipeline.parameters():
                parameter.grad = None
    differ = sum(not torch.equal(a, b) for a, b in zip(*grads, strict=True))
    more = [after - before for before, after in zip(*begun, strict=True)]
    return {"differ": largest([float(differ)]), "more": more, "blocks": WIDE.layers}


WAITS = [(1, "start"), (1, "end"), (2, "backward"), (3, "forward")]


def two(folder: Path, rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group(folder, rank, world):
        for zero in (1, 2, 3):
            plan = make_plan(1, 2, 1, WHOLE, EVEN, zero=zero)
            found[f"memory {zero}"] = memory(zero, rank)
            found[f"traffic {zero}"] = traffic(plan, rank)
            found[f"traffic {zero}"]["bf16"] = counted_bytes(plan, rank, torch.bfloat16)
        for zero, where in WAITS:
            plan = make_plan(1, 2, 1, WHOLE, EVEN, zero=zero)
            found[f"waiting {zero} {where}"] = waiting(plan, rank, (1,), where)
    return found


def four(folder: Path, rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group(folder, rank, world):
        for zero in (1, 2, 3):
            found[f"pairs {zero}"] = traffic(make_plan(1, 4, 1, WHOLE, FOUR, zero=zero, shard=2), rank)
            found[f"bf16 {zero}"] = half_precision(zero, rank)
        for mode in ("none", "bf16", "int8"):
            found[f"copies {mode}"] = between_pairs(2, {"mode": mode}, rank)
        pairs = make_plan(1, 4, 1, WHOLE, FOUR, zero=1, shard=2)
        found["waiting for the other pair"] = waiting(pairs, rank, (2, 3), "end")
    return found


if __name__ == "__main__":
    launch({"two": two, "four": four}[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
