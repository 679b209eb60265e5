"""Compiling takes longer than a step may: the agents give more time to the places where it happens, and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpctrain.records.history.generation import Fence
from hpctrain.records.run.run import Run
from hpctrain.worker.loop import Loop

RUN = {
    "steps": 10, "cluster": {"kind": "local"}, "model": {"preset": "tiny-1m"}, "data": {"train": ["/data"]},
    "batch": {"global": 8}, "recovery": {"progress_timeout_s": 60},
}  # fmt: skip


@pytest.mark.parametrize(("compiles", "longest_s"), [(False, 60), (True, 1800)])
def test_only_compiling_may_take_long(compiles: bool, longest_s: float) -> None:
    run = Run.model_validate({**RUN, "compile": compiles})
    assert (run.recovery.progress_timeout_s, run.step_timeout_s) == (60, longest_s)


@pytest.mark.parametrize(("compiles", "told"), [(False, []), (True, ["compiling"])])
def test_the_first_validation_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiles: bool, told: list[str]
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    monkeypatch.setattr("hpctrain.worker.loop.RankMetrics", lambda _: None)
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(compile=compiles, validation=SimpleNamespace(batches=0)),
        step=0, folder=tmp_path, coordinate=SimpleNamespace(tp=0, rank=1), pipeline=SimpleNamespace(take_counters=dict),
        train=SimpleNamespace(device=torch.device("cpu")),
        plan=SimpleNamespace(rows=1), valid={"valid": None}, fence=Fence(tmp_path, 0), from_memory=False,
    )  # fmt: skip
    said: list[str] = []
    orders: Any = SimpleNamespace(send=lambda report: said.append(report.kind))
    loop = Loop(trainer, orders)
    for _ in range(2):
        loop._validate()
    assert said == told
