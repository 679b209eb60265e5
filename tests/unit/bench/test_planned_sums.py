"""The method auto of the compression bench: the planner sees the processes as devices of nodes. That they sum as it
chose is in tests/dist/test_codecs.py."""

from __future__ import annotations

import pytest

from hpctrain.bench.compression.planned_codec import (
    USUAL_CHOICE,
    LinkCost,
    StepWorkload,
    make_node,
    plan_for,
)
from hpctrain.bench.planner.search import uniform_topology
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.topology.topology import Device

SLOW, FAST = (2e-4, 8e-8), (2e-5, 2e-10)
"""Links of 100 Mbit/s, and memory."""
WORK = StepWorkload(DecoderSpec(layers=4, dim=256, heads=4, vocab=320), rows=1, seq_len=64)
DEVICE = Device(id="cpu0", type="cpu", flops={"fp32": 2e10}, memory_bytes_per_s=1e10, launch_s=2e-6)


@pytest.mark.parametrize(
    ("devices", "within", "flat"), [(2, FAST, False), (2, SLOW, True), (1, None, True)], ids=["fast", "slow", "single"]
)
def test_nodes_sum_first_where_the_links_within_them_are_fast(
    devices: int, within: LinkCost | None, flat: bool
) -> None:
    topology = uniform_topology([make_node(number, [DEVICE] * devices, within) for number in range(4)], "cpu", *SLOW)
    made = plan_for(topology, WORK, USUAL_CHOICE)
    assert (made.dp, made.codec.mode) == (4 * devices, "int4")
    assert (made.intra_node == "flat") == flat
