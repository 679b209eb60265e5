"""What mode auto comes to on a slow link and on none, by processes that measure it and obey it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.process import SystemRunner
from hpctrain.bench.compression import lab_place, local_place, measure_place
from hpctrain.bench.compression_rank import CORPUS_FOLDER
from hpctrain.bench.compression_scene import Settings
from hpctrain.bench.scene import make_corpus
from hpctrain.lab.layout import load_layout
from hpctrain.lab.machine import this_machine
from hpctrain.records.model_spec import ModelSpec

SETTINGS = Settings(
    steps=2, block_steps=2, warm_steps=3, seq_len=16, spec=ModelSpec(layers=2, dim=256, heads=4, vocab=320)
)


@pytest.mark.slow
@pytest.mark.requires("slurm", "lab")
def test_a_slow_link_is_compressed_and_a_loopback_is_not(cluster, tmp_path: Path) -> None:
    make_corpus(tmp_path / CORPUS_FOLDER)
    found = {}
    for place in (lab_place(this_machine(), load_layout(cluster.folder), 2, "100mbit"), local_place(2)):
        with place as where:
            (row,) = measure_place(SystemRunner(), where, ["auto"], SETTINGS, tmp_path)
            found[row.link] = row
    slow, fast = found["100mbit"], found["loopback"]
    assert (slow.choice, fast.choice) == ("power_sgd", "none")
    # Of two ranks each sends 4 bytes for each number of an exact sum.
    assert slow.counted_bytes_per_parameter < 0.5
    assert fast.counted_bytes_per_parameter == 4
