"""Which rank is slow, and where the time of the ranks goes, by metrics-ranks.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.report.rank_times import read_last_layers, read_last_rank_rows, slow_rank_text


def row(rank: int, compute_s: float, step: int = 20, stages: tuple[int, ...] = (0,), generation: int = 0) -> RankRow:
    return RankRow(
        step=step, steps=10, generation=generation, rank=rank, device=f"n{rank}:cuda0", stages=list(stages),
        forward_s=[compute_s / 4] * len(stages), backward_s=[3 * compute_s / 4] * len(stages), wait_pp_s=0.01,
        wait_dp_s=0.02, wait_world_s=0.03, wait_device_s=0.0, hidden_dp_s=0.04, memory_bytes=1e9,
    )  # fmt: skip


def test_the_rank_that_is_slower_than_its_peers_is_named() -> None:
    rows = [row(0, 1.0), row(1, 1.05), row(2, 1.5), row(3, 0.95)]
    assert slow_rank_text(rows) == "rank 2 (n2:cuda0) computes 1.50 times as long as the median of its peers"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0, 1.0)],
        [row(0, 1.0), row(1, 1.05)],
        [row(0, 1.0, stages=(0,)), row(1, 3.0, stages=(1,))],
        [row(0, 0.0), row(1, 0.0)],
    ],
)
def test_without_peers_that_are_faster_nobody_is_slow(rows: list[RankRow]) -> None:
    assert slow_rank_text(rows) is None


def test_only_the_last_steps_count(tmp_path: Path) -> None:
    rows = [row(0, 9.0, step=10), row(1, 1.0, step=10), row(1, 1.0), row(0, 1.0), row(0, 8.0, generation=1)]
    lines = [json.dumps(each.to_json()) for each in rows]
    assert read_last_rank_rows(tmp_path) == []
    path = tmp_path / RANK_LOG
    path.write_text("\n".join(lines[:4]) + "\n")
    assert [each.rank for each in read_last_rank_rows(tmp_path)] == [0, 1]
    path.write_text("\n".join(lines) + '\n{"step": 20, "gene')
    assert read_last_rank_rows(tmp_path) == rows[4:]
    path.write_text('{"step": 1, "generation": 0}\n[3]\nnull\n')
    assert read_last_rank_rows(tmp_path) == []


def test_the_newest_layers_are_those_of_the_last_rows_that_have_any(tmp_path: Path) -> None:
    assert read_last_layers(tmp_path) == []
    layers = [LayerFigures(layer="0", numbers=3, gradient_variance=variance) for variance in (1.0, 3.0)]
    rows = [
        row(0, 1.0, step=10).model_copy(update={"layers": layers[1:]}),
        row(0, 1.0).model_copy(update={"layers": layers[:1]}),
        row(1, 1.0).model_copy(update={"layers": layers[1:]}),
        row(0, 1.0, step=30),
    ]
    (tmp_path / RANK_LOG).write_text("".join(json.dumps(each.to_json()) + "\n" for each in rows))
    assert read_last_layers(tmp_path) == [LayerFigures(layer="0", numbers=3, gradient_variance=2.0)]
