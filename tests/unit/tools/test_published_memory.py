"""Predicted peaks of published runs: what leaves gaps in the allocator, and the fit of gaps and process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published_rows import DEEPSPEED, scenes, write

from hpctrain.planner.cost.memory import MemoryModel
from hpctrain.planner.cost.workload import ModelPart
from tools.published_runs.data_sheets import SHEETS
from tools.published_runs.memory_fit import GAP_SHARES, PROCESS_BYTES, fit_memory, memory_fits
from tools.published_runs.scenario import PublishedScenario
from tools.published_runs.table import read_runs

PIPELINE = DEEPSPEED | {
    "num_gpus": "16", "tp": "2", "pp": "4", "dp": "2", "global_batch": "32", "micro_batch": "2", "iter_time_s": "1.0",
}  # fmt: skip
"""A model of 12 blocks of width 1024, on 4 stages of tensor-parallel pairs, with 8 micro-batches of 2 sequences."""


def test_gaps_are_a_share_of_activations_and_of_the_gradients_of_blocks(tmp_path: Path) -> None:
    [scene] = scenes(tmp_path, PIPELINE)
    peaks = scene.layout.memory(MemoryModel(scene.work))
    none = replace(scene.work, framework=replace(scene.work.framework, gap_share=0.0))
    tensors = scene.layout.memory(MemoryModel(none))
    device = scene.layout.unit(0, 0).device_ids[0]
    stream = 2 * 1024 * 1024 * 2
    # Of each of 4 micro-batches the first stage keeps the inputs of its 3 blocks and, on each device of the pair, half
    # of its output. While a block computes, it also has the restored output and its gradient.
    activations = 4 * (3 + 1 / 2) * stream + scene.work.block_bytes(2, 2) + 2 * stream
    gradients = 2 * scene.work.parameters(ModelPart(3, False, False), 2)
    share = scene.work.framework.gap_share
    assert share > 0
    assert peaks[device] - tensors[device] == pytest.approx(share * (activations + gradients))


def test_gaps_count_up_to_the_memory_of_the_device(tmp_path: Path) -> None:
    card = SHEETS["A100"].memory_bytes

    def filled(share: float) -> PublishedScenario:
        """Return the scenario with state that, without gaps, fills a share of the device."""
        [scene] = scenes(tmp_path, PIPELINE)
        framework = scene.work.framework
        missing = share * card - scene.peak_bytes(framework.process_bytes or 0.0, 0.0)
        framework = replace(framework, process_bytes=(framework.process_bytes or 0.0) + missing, gap_share=10.0)
        return replace(scene, work=replace(scene.work, framework=framework))

    assert filled(0.99).memory_bytes() == card
    assert filled(1.5).memory_bytes() == pytest.approx(1.5 * card)


def test_a_gb_of_bigscience_is_a_thousand_mib_of_nvidia_smi(tmp_path: Path) -> None:
    peak = {"peak_mem_GiB": "80"}
    bigscience, other = read_runs(write(tmp_path / "runs.csv", [DEEPSPEED | peak, peak]))
    assert (bigscience.peak_bytes, other.peak_bytes) == (80_000 * 2**20, 80 * 2**30)


def test_a_fit_finds_process_and_gaps_and_judges_them_by_other_runs(tmp_path: Path) -> None:
    rows = [
        PIPELINE | {"id": f"{dtype}{size}", "dtype": dtype, "micro_batch": size}
        for dtype in ("fp16", "bf16")
        for size in ("1", "2", "4")
    ]
    made = scenes(tmp_path, *rows)
    # Measured peaks in the middle of the goal for 3 GB and a share of 0.5.
    measured = [
        replace(scene, run=replace(scene.run, peak_bytes=scene.peak_bytes(3e9, 0.5) / 1.15**0.5)) for scene in made
    ]
    record = memory_fits(measured)
    assert record is not None
    for part in ("fp16", "bf16"):
        found = record["fits"][part]
        assert (found["process_gb"], found["gap_share"], found["others"]) == (pytest.approx(3.0), 0.5, 3)
        assert (found["lowest_pct"], found["highest_pct"]) == pytest.approx((7.24, 7.24), abs=0.01)
    assert record["halves_in_goal"] == 1.0
    assert memory_fits(measured[:3]) is None, "runs of one precision judge nothing"


def test_a_fit_is_judged_by_its_worst_run() -> None:
    ratios = np.full((len(PROCESS_BYTES), len(GAP_SHARES), 3), 1.07)
    ratios[:, :, 2] = 1.2
    ratios[4, 5] = (1.0, 1.0, 1.14)
    assert fit_memory(ratios) == (4, 5)
