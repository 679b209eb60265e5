"""What cannot be executed is said before anything starts, with the reason and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.schedule.runnable import check_runnable

MIXED = [{"codec": {"mode": "mixed", "groups": [{"mode": "int4", "layers": "attention"}]}}]
PLACES = [f"n{index}:cpu0" for index in range(6)]
HALVES = {0: {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1I0", "1F1", "1W0", "1B1"]}}


def plan(tp: int = 1, recompute: tuple[str, str] = ("none", "none"), **values: Any) -> Plan:
    """Two stages of one block on two ranks, each of `tp` devices."""
    devices = [[f"n{stage}:cpu{part}" for part in range(tp)] for stage in range(2)]
    stages = [{"layers": (stage, stage + 1), "recompute": recompute[stage]} for stage in range(2)]
    return Plan.model_validate(
        {
            "pp": 2, "dp": 1, "tp": tp, "stages": stages, "ranks": [place for row in devices for place in row],
            "replicas": [{"rows": 4, "micro_batch": 2, "micro_batches": 2, "devices": devices}], **values,
        }
    )  # fmt: skip


def replicas(mode: str, micro_batches: int = 1, **values: Any) -> Plan:
    """One stage on four devices, with a codec."""
    devices = [f"n{index}:cpu0" for index in range(4)]
    each = [
        {"rows": micro_batches, "micro_batch": 1, "micro_batches": micro_batches, "devices": [[device]]}
        for device in devices
    ]
    return Plan.model_validate(
        {
            "pp": 1, "dp": 4, "tp": 1, "stages": [{"layers": (0, 2)}], "ranks": devices, "replicas": each,
            "compression": [{"codec": {"mode": mode}}], **values,
        }
    )  # fmt: skip


def run(**values: Any) -> Run:
    return Run.model_validate(
        {
            "steps": 1, "model": {"dims": {"layers": 2, "dim": 16, "heads": 2}}, "batch": {"global": 4},
            "data": {"train": ["t"], "seq_len": 30}, **values,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        (plan(), run(compile=True)),
        (plan(tp=3, sequence_parallel=True), run()),
        (plan(recompute=("full", "selective")), run(compile=True)),
        (plan(recompute=("full", "none"), actions=HALVES), run()),
        (replicas("topk"), run()),
        (replicas("topk", zero=1, shard=2), run()),
        (replicas("none", zero=1, shard=2, compression=MIXED), run(precision="fp16")),
        (replicas("bf16", zero=3), run()),
        (replicas("topk", zero=3), run()),
        (replicas("tagc", zero=3), run()),
        (replicas("int8", micro_batches=2, zero=2), run(precision="bf16")),
        (replicas("adaptive", micro_batches=2, zero=1), run()),
    ],
)
def test_what_can_run_passes(found: Plan, asked: Run) -> None:
    check_runnable(found, asked)


@pytest.mark.parametrize(
    ("found", "asked", "message"),
    [
        (plan(tp=4, sequence_parallel=True), run(), "data.seq_len: found 30; .* a multiple of tp 4; change it, or"),
        (plan(tp=2), run(compile=True), "compile: found true with tp 2; .*; switch compile off, or use tp 1"),
        (plan(actions=HALVES), run(compile=True), "compile: found true with the action 1I0; .* use schedule 1f1b"),
        (
            plan(recompute=("none", "selective"), actions=HALVES), run(),
            r"stages\[1\].recompute: found selective with the action 1I0; .* use recompute none, or schedule 1f1b",
        ),
        (
            replicas("power_sgd", zero=1), run(),
            "compression.mode: found power_sgd with zero 1 over all replicas; .* adaptive or tagc, parallel.zero 0, or",
        ),
        (
            replicas("none", zero=1, compression=MIXED), run(),
            "compression.mode: found mixed with zero 1 over all replicas; .* adaptive or tagc, parallel.zero 0, or",
        ),
        (
            replicas("topk", micro_batches=2, zero=2), run(),
            "compression.mode: found topk with zero 2 over all replicas and 2 micro-batches; .* use parallel.zero 1",
        ),
        (
            replicas("topk", zero=1), run(precision="fp16"),
            "compression.mode: found topk with zero 1 over all replicas and precision fp16; .* use precision bf16, or",
        ),
        (
            replicas("int4", zero=1), run(precision="fp16"),
            "compression.mode: found int4 with zero 1 over all replicas and precision fp16; .* none, bf16, rotated",
        ),
        (
            plan(
                dp=3, compression=[{"codec": {"mode": "local_steps"}}], ranks=PLACES,
                replicas=[
                    {"rows": 1, "micro_batch": 1, "micro_batches": 1, "devices": [[a], [b]]}
                    for a, b in zip(PLACES[::2], PLACES[1::2], strict=True)
                ],
            ),
            run(model={"dims": {"layers": 2, "dim": 16, "heads": 2, "tied": True}}),
            "compression.mode: found local_steps with pp 2 and weights in several stages .* use another mode",
        ),
        (plan(schedule="custom"), run(), "plan: actions.0.: no table is given"),
    ],
)  # fmt: skip
def test_what_cannot_is_refused_with_its_reason(found: Plan, asked: Run, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_runnable(found, asked)
