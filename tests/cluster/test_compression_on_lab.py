"""What mode auto comes to on a slow link and on none, by processes that measure it and obey it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.process import SystemRunner
from hpctrain.bench.compression.launch import LaunchSettings
from hpctrain.bench.compression.rank import CORPUS_FOLDER
from hpctrain.bench.compression.step_times import lab_site, local_site, measure_site
from hpctrain.lab.layout import load_layout
from hpctrain.lab.machine import this_machine
from hpctrain.launch.small_run import make_corpus
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.integers import Quantized

SETTINGS = LaunchSettings(
    steps=2, block_steps=2, warm_steps=3, seq_len=16, spec=DecoderSpec(layers=2, dim=256, heads=4, vocab=320)
)
NUMBER_BYTES = {mode: make_codec({"mode": mode}).dense_bytes for mode in Quantized.modes()}
BYTES = {"none": (4, 4), "bf16": (2, 2.01)} | {mode: (each, each + 0.0145) for mode, each in NUMBER_BYTES.items()}
"""For each parameter, of two ranks: each sends as many numbers as there are, of small tensors in fp32."""


def as_exact_as_the_gain_allows(step_s: dict[str, float]) -> str:
    """Each mode in turn is taken if a step is by 3 % shorter than with the one taken before."""
    chosen = "none"
    for mode in ("bf16", *Quantized.modes()):
        if 1 - step_s[mode] / step_s[chosen] >= 0.03:
            chosen = mode
    return chosen


@pytest.mark.slow
@pytest.mark.requires("slurm", "lab")
def test_a_slow_link_is_compressed_and_a_loopback_as_the_planner_says(cluster, tmp_path: Path) -> None:
    make_corpus(tmp_path / CORPUS_FOLDER)
    found = {}
    for place in (lab_site(this_machine(), load_layout(cluster.folder), 2, "100mbit"), local_site(2)):
        with place as where:
            (row,) = measure_site(SystemRunner(), where, ["auto"], SETTINGS, tmp_path)
            found[row.link] = row
    slow, fast = found["100mbit"], found["loopback"]
    assert slow.choice != "none"
    for row in (slow, fast):
        # What a loopback is worth depends on what else the machine does; so does what the planner expects of it.
        assert row.choice == as_exact_as_the_gain_allows(row.planned_step_s)
        least, most = BYTES[row.choice]
        assert least <= row.counted_bytes_per_parameter <= most
