"""Every mode of the table of codecs has its price, its row in the bench and its line on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.bench.compression.methods import CODEC_METHODS, METHODS
from hpctrain.compress.codecs.integers import BLOCK, IntegerCode
from hpctrain.planner.search.codec_choice import candidate_codecs
from hpctrain.records.plan.compression import MODES, Quantized, make_codec
from hpctrain.records.plan.gradient_codec import SCALE_BYTES
from hpctrain.records.topology.topology import CodecSeconds

PAGE = Path(__file__).parents[3] / "docs" / "compression.md"


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_its_price(mode: str) -> None:
    codec = make_codec({"mode": mode})
    assert 0 < codec.wire_bytes(4e6, 4) <= 24e6
    assert codec.wire_bytes(4e6, 1) == 0
    assert codec.rounds(8, 4) > 0
    assert codec.passes(4) > 0
    assert (codec.state_bytes(1024) > 0) == codec.has_state
    assert codec.measured_as is None or codec.measured_as in CodecSeconds.model_fields
    # Exact sums, and weights that are summed instead, are copied to buckets; everything else is measured.
    assert (codec.measured_as is None) == (codec.exact or not codec.sums_gradients)
    assert codec.exact or codec.wire_bytes(4e6, 4) < 24e6


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_its_row_in_the_bench(mode: str) -> None:
    rows = [name for name, settings in CODEC_METHODS.items() if settings["mode"] == mode]
    assert rows
    assert all(name in METHODS and make_codec(CODEC_METHODS[name]).mode == mode for name in rows)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_every_mode_has_its_line_on_the_page(mode: str) -> None:
    table, _ = PAGE.read_text().split("## Mode auto")
    lines = [line for line in table.splitlines() if re.match(rf"\| [^|]*`{mode}`[^|]* \|", line)]
    assert lines, f"docs/compression.md has no line about {mode} in its table"


@pytest.mark.parametrize("mode", Quantized.modes())
def test_integers_are_priced_as_they_are_written(mode: str) -> None:
    codec = make_codec({"mode": mode})
    assert isinstance(codec, Quantized)
    assert IntegerCode(codec.bits).bytes_of(BLOCK) == BLOCK * codec.dense_bytes
    assert codec.dense_bytes == codec.bits / 8 + SCALE_BYTES


def test_mode_auto_tries_what_the_table_says_the_least_lossy_first() -> None:
    candidates = candidate_codecs(1000, lossy=True)
    assert {codec.mode for codec in candidates} == {m for m, codec in MODES.items() if codec.auto_settings is not None}
    assert [codec.lossy for codec in candidates] == sorted(codec.lossy for codec in candidates)
    dense = [codec.wire_bytes(1.0, 2) for codec in candidates if not codec.lossy]
    assert dense == sorted(dense, reverse=True)
