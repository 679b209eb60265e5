"""Every mode of the table of codecs has its price, its row in the bench and its line on the page."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from hpctrain.bench.compression.methods import CODEC_METHODS, METHODS
from hpctrain.compress.codecs.integers import BLOCK, IntegerCode
from hpctrain.compress.codecs.rotated_integers import RotatedIntegerCode
from hpctrain.planner.search.codec_choice import candidate_codecs
from hpctrain.records.plan.compression import MODES, make_codec
from hpctrain.records.plan.gradient_codec import SCALE_BYTES
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.loss_gaps import LOSS_GAPS, LossGap
from hpctrain.records.plan.rotated import RotatedIntegers
from hpctrain.records.topology.topology import CodecSeconds

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "compression.md"


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


@pytest.mark.parametrize("mode", RotatedIntegers.modes())
def test_rotated_integers_are_priced_as_they_are_written(mode: str) -> None:
    codec = make_codec({"mode": mode})
    assert isinstance(codec, RotatedIntegers)
    code = RotatedIntegerCode(codec.bits, codec.seed)
    assert code.bytes_of(code.part_multiple) == code.part_multiple * codec.dense_bytes


def test_mode_auto_tries_what_the_table_says_the_least_lossy_first() -> None:
    candidates = candidate_codecs(1000, math.inf)
    usual = [codec.loss_settings for codec in candidates if codec.loss_gap is None or codec.auto_settings is not None]
    assert {settings["mode"] for settings in usual} == {m for m, c in MODES.items() if c.auto_settings is not None}
    assert len({codec.label for codec in candidates}) == len(candidates)
    assert [codec.may_raise_loss for codec in candidates] == sorted(codec.may_raise_loss for codec in candidates)
    dense = [codec.wire_bytes(1.0, 2) for codec in candidates if not codec.may_raise_loss]
    assert dense == sorted(dense, reverse=True)


@pytest.mark.parametrize("limit", [0.0, 0.004, 0.02, 0.1, 0.5, math.inf])
def test_a_loss_budget_allows_what_was_measured_to_lose_no_more(limit: float) -> None:
    allowed = candidate_codecs(1000, limit)
    everything = candidate_codecs(1000, math.inf)
    assert allowed == [codec for codec in everything if codec in allowed], "in the same order"
    for codec in everything:
        gap = math.inf if codec.loss_gap is None else codec.loss_gap.share
        within = not codec.may_raise_loss or (limit > 0 and gap <= limit)
        assert (codec in allowed) == within
    if limit == 0:
        assert [codec.mode for codec in allowed] == ["none", "bf16", *Quantized.modes()]
    # What needs no budget lost less than 1 %; the planner relies on it without asking.
    quiet = [codec for codec in everything if not codec.may_raise_loss and not codec.exact]
    assert all(codec.loss_gap is not None and codec.loss_gap.share < 0.01 for codec in quiet)


@pytest.mark.parametrize("gap", LOSS_GAPS, ids=lambda gap: gap.settings["mode"])
def test_a_measured_gap_is_that_of_a_codec_and_of_its_line_on_the_page(gap: LossGap) -> None:
    codec = make_codec(gap.settings)
    assert codec.loss_settings == gap.settings, "only settings that are not defaults, or the codec is not recognised"
    assert codec.loss_gap is gap, "one row for each codec"
    assert make_codec(gap.settings | {"intra_node": "bf16"}).loss_gap is gap
    methods = [name for name in re.findall(r"--method (\S+)", gap.options) if name in CODEC_METHODS]
    assert not methods or any(make_codec(CODEC_METHODS[name]).loss_gap is gap for name in methods)
    page = (DOCS / "results" / "compression.md").read_text()
    line = f"| `{codec.label}` | {gap.figure} | {gap.scene} | `{gap.options}` |"
    assert line in page, f"put this line into the table of gaps on docs/results/compression.md: {line}"


def test_the_page_has_no_gap_that_mode_auto_does_not_know() -> None:
    _, table = (DOCS / "results" / "compression.md").read_text().split("| codec | loss gap | trained |")
    rows = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == len(LOSS_GAPS)


def test_settings_without_a_measured_gap_are_not_known() -> None:
    assert make_codec({"mode": "topk", "density": 0.5}).loss_gap is None
    assert make_codec({"mode": "int4", "layers": "non_attention"}).loss_gap is None
    assert make_codec({"mode": "power_sgd", "warmup_steps": 7}).loss_gap is not None
