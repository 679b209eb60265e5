"""What a codec says it puts on the wire, next to the exact sums it replaces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.plan.compression import Mixed, make_codec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.low_rank import PowerSgd, square_width
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.optimizer import Optimizer

BYTES, WORLD = 4e6, 4
RING = 2 * (WORLD - 1) * BYTES


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"mode": "none"}, 1.0),
        ({"mode": "bf16"}, 1 / 2),
        # A scale of four bytes for each 256 numbers.
        *(({"mode": mode}, (int(mode[3:]) / 8 + 1 / 64) / 4) for mode in Quantized.modes()),
        *(({"mode": f"rotated_int{bits}"}, (bits / 8 + 1 / 128) / 4) for bits in (4, 3, 2)),
        # A value of two bytes and a position, or a bit for every position, whichever is less.
        ({"mode": "topk", "density": 0.01}, (0.01 * 2 + 0.01) / 4),
        ({"mode": "topk", "density": 0.25, "values": "int8"}, (0.25 + 1 / 8) / 4),
        ({"mode": "adaptive", "limits": [0.9, 0.9]}, (0.1 * 2 + 0.1) / 4),
        # A bit for each number, there and back; or four, as published.
        ({"mode": "tagc", "ratio": 4}, 1 / 4 + 1 / 8 / 4),
        ({"mode": "tagc", "ratio": 4, "index": "4bit"}, 1 / 4 + 1 / 2 / 4),
        # Factors in bf16; a remainder of some bits and its scales.
        ({"mode": "power_sgd", "rank": 4}, 2 * 4 / 1024 / 2),
        ({"mode": "power_sgd", "rank": "auto"}, 1 / 16),
        ({"mode": "power_sgd", "rank": "auto", "remainder": "int2"}, 17 / 1024 + (1 / 4 + 1 / 128) / 4),
        ({"mode": "power_sgd", "rank": "auto", "remainder": "int1"}, 17 / 1024 + (1 / 8 + 1 / 128) / 4),
        ({"mode": "local_steps", "every": 10}, 1 / 10),
    ],
)
def test_bytes_on_the_wire(settings: dict[str, Any], share: float) -> None:
    codec = make_codec(settings)
    assert codec.wire_bytes(BYTES, WORLD) == pytest.approx(RING * share)
    assert codec.wire_bytes(BYTES, 1) == 0


def test_a_layer_group_has_the_settings_that_its_codec_has_for_all_layers() -> None:
    groups = [{"mode": "rotated_int2", "layers": "attention", "seed": 3}, {"mode": "int4", "layers": "feed_forward"}]
    codec = make_codec({"mode": "mixed", "groups": groups})
    assert isinstance(codec, Mixed)
    assert codec.codec_of("attention") == make_codec(groups[0])
    assert codec.codec_of("feed_forward") == make_codec(groups[1])
    assert codec.codec_of("embedding_head") == make_codec({"mode": "none"})
    assert codec.to_json() == {"mode": "mixed", "groups": groups}


@given(
    rows=st.integers(8, 4096),
    columns=st.integers(8, 4096),
    remainder=st.sampled_from(["none", "int2", "int1"]),
    least=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_a_rank_of_the_width_keeps_the_stated_bytes(rows: int, columns: int, remainder: str, least: float) -> None:
    """Bytes a parameter that each of four ranks sends, from the width on at which the factors have a column."""
    codec = make_codec({"mode": "power_sgd", "rank": "auto", "remainder": remainder, "min_compression": least})
    assert isinstance(codec, PowerSgd)
    rank = codec.rank_of(square_width(rows, columns))
    integers = (int(remainder[3:]) / 8 + 1 / 128) * rows * columns if remainder != "none" else 0.0
    sent = 2 * rank * (rows + columns) + integers
    assert 1 <= rank <= min(rows, columns)
    assert codec.compresses(rows, columns) == (sent * least <= 4 * rows * columns)
    if square_width(rows, columns) >= 68:
        assert 1.5 * sent / (rows * columns) <= {"none": 0.375, "int2": 0.49, "int1": 0.30}[remainder] * (1 + 1e-9)


def test_the_warm_up_of_low_rank_is_a_tenth_of_the_run_unless_it_is_set() -> None:
    codec = make_codec({"mode": "power_sgd"})
    assert isinstance(codec, PowerSgd)
    assert codec.for_run(2005).warmup_steps == 201
    assert codec.model_copy(update={"warmup_steps": 7}).for_run(2005).warmup_steps == 7
    for warmup_steps, steps in ((1000, 2005), (10**6, 95)):
        assert Optimizer(warmup_steps=warmup_steps).warmup(steps) <= codec.for_run(steps).warmup_steps


def test_what_ranks_keep_is_of_mesh_and_codec_not_of_devices() -> None:
    def plan(node: str, **changes: Any) -> Plan:
        devices = [f"{node}{index}:cpu0" for index in range(2)]
        replicas = [{"sequences": 2, "micro_batch": 2, "micro_batches": 1, "devices": [[device]]} for device in devices]
        return Plan.model_validate({
            "pp": 1, "dp": 2, "tp": 1, "stages": [{"layers": [0, 2]}], "replicas": replicas, "ranks": devices,
            **changes,
        })  # fmt: skip

    here = plan("a").reduction_sha256
    assert plan("b").reduction_sha256 == here
    assert plan("a", compression=[{"codec": {"mode": "bf16"}}]).reduction_sha256 != here
    assert plan("a", compression=[{"codec": {"mode": "none"}, "reason": "fast links"}]).reduction_sha256 == here
    assert plan("a", zero=1).reduction_sha256 != here
    assert plan("a", stages=[{"layers": [0, 3]}]).reduction_sha256 != here
