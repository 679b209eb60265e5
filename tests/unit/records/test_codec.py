"""What a codec says it puts on the wire, next to the exact sums it replaces."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.records.plan.compression import Quantized, make_codec
from hpctrain.records.plan.plan import Plan

BYTES, WORLD = 4e6, 4
RING = 2 * (WORLD - 1) * BYTES


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"mode": "none"}, 1.0),
        ({"mode": "bf16"}, 1 / 2),
        # A scale of four bytes for each 256 numbers.
        *(({"mode": mode}, (int(mode[3:]) / 8 + 1 / 64) / 4) for mode in Quantized.modes()),
        # A value of two bytes and a position, or a bit for every position, whichever is less.
        ({"mode": "topk", "density": 0.01}, (0.01 * 2 + 0.01) / 4),
        ({"mode": "topk", "density": 0.25, "values": "int8"}, (0.25 + 1 / 8) / 4),
        ({"mode": "adaptive", "limits": [0.9, 0.9]}, (0.1 * 2 + 0.1) / 4),
        ({"mode": "tagc", "ratio": 4}, 1 / 4 + WORLD / 2 / 8 / 4),
        ({"mode": "power_sgd", "rank": 4}, 2 * 4 / 1024),
        ({"mode": "local_steps", "every": 10}, 1 / 10),
    ],
)
def test_bytes_on_the_wire(settings: dict[str, Any], share: float) -> None:
    codec = make_codec(settings)
    assert codec.wire_bytes(BYTES, WORLD) == pytest.approx(RING * share)
    assert codec.wire_bytes(BYTES, 1) == 0


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
