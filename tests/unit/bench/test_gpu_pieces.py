"""The bench of choosing on a GPU: its arithmetic, which needs none, and what it says where there is none."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
import torch
from click.testing import CliRunner

from hpctrain.base.errors import InputError
from hpctrain.bench.compression.pieces import (
    GPU_NUMBERS,
    GpuPieceRow,
    Work,
    in_turns,
    measure_on_gpu,
    measure_pieces_of,
)
from hpctrain.cli.bench.group import bench_command


def test_bytes_are_those_of_the_gradient_and_shares_are_of_the_copy() -> None:
    # In turns: the copy, torch.topk, select sampled, the pass of torch's operations. The first turn does not count.
    turns = iter([9.0, 9.0, 9.0, 9.0, 0.1, 8.0, 0.4, 0.2, 0.2, 8.0, 0.5, 0.25, 0.3, 8.0, 0.6, 0.3])

    def seconds_of(work: Work) -> float:
        work()
        return next(turns)

    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    copy, topk, sampled, by_torch = measure_pieces_of(values, [0.05], 3, seconds_of)
    assert next(turns, None) is None
    assert [copy.time_s, topk.time_s, sampled.time_s, by_torch.time_s] == [0.2, 8.0, 0.5, 0.25]
    assert (sampled.low_s, sampled.high_s) == (0.4, 0.6)
    assert copy.bytes_per_s == pytest.approx(400_000 / 0.2)
    assert by_torch.bytes_per_s == pytest.approx(400_000 / 0.25)
    assert (copy.share_of_copy, by_torch.share_of_copy) == (1.0, pytest.approx(0.8))
    assert (copy.chosen, topk.chosen) == (1.0, 0.05)
    assert sampled.chosen == by_torch.chosen == pytest.approx(0.05, rel=0.1)


def test_pieces_take_turns() -> None:
    order = []
    times = itertools.count()

    def seconds_of(work: Work) -> float:
        work()
        return float(next(times))

    found = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, seconds_of)
    assert order == ["a", "b", "a", "b"]
    assert found == {"a": [0.0, 2.0], "b": [1.0, 3.0]}


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["compression", "--pieces", "--device", "cuda"]
    done = CliRunner().invoke(bench_command, asked, standalone_mode=False)
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "--device cuda: torch finds no CUDA device here; allowed here: cpu, auto"


def test_the_device_is_one_of_the_pieces() -> None:
    done = CliRunner().invoke(bench_command, ["compression", "--device", "cuda"], standalone_mode=False)
    assert "--device: not without --lab, --convergence or --pieces" in str(done.exception)


@pytest.mark.requires("cuda")
def test_a_gpu_is_measured() -> None:
    name, rows = measure_on_gpu([0.05], 2**20, 2)
    assert name == torch.cuda.get_device_name()
    assert [row.piece for row in rows][:3] == ["copy", "torch.topk", "select sampled"]
    assert all(0 < row.low_s <= row.time_s <= row.high_s for row in rows)


def test_the_table_and_the_record_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = GpuPieceRow("copy", 0.01, 1.0, 2e-3, 1e-3, 3e-3, 5e11, 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("hpctrain.bench.compression.pieces.measure_on_gpu", lambda: ("A card", [row]))
    done = CliRunner().invoke(bench_command, ["compression", "--pieces", "--json"], standalone_mode=False)
    assert "on A card" in done.stderr
    assert "500 GB/s" in done.stderr
    record = json.loads(done.stdout)
    assert record["settings"] == {"numbers": GPU_NUMBERS, "device": "A card"}
    assert record["rows"] == [asdict(row)]
