"""A plan for all devices is hardly slower than the planner's plan for any part of them."""

from __future__ import annotations

import random

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.bench.planner.search import PAPER
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from tools.cluster_parts import halves_and_kinds, random_cluster, step_s

MOST = 1.02
"""Largest step time of the plan for all devices, as a multiple of that of a plan for a part. Searches try only likely
plans, so those of parts of parts may find a slightly faster one."""


def _run(seed: int, divisor: int = 1) -> Run:
    draw = random.Random(seed)
    dims = {"layers": draw.choice((12, 22)) // divisor, "dim": 1024, "heads": 16, "vocab": 32000}
    return Run.model_validate(
        {
            "steps": 1,
            "precision": "bf16",
            "model": {"dims": dims},
            "data": {"train": ["data"], "seq_len": 1024},
            "batch": {"global": draw.choice((60, 64, 256, 500)) // divisor},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "devices", "divisor"), [(2, 100, 1), (4, 90, 1), (6, 128, 2)])
def test_no_part_of_a_cluster_has_a_faster_plan(seed, devices, divisor):
    topology, run = random_cluster(seed, devices), _run(seed, divisor)
    whole_s = step_s(run, topology)
    for names in halves_and_kinds(topology):
        assert whole_s <= MOST * step_s(run, topology.only(names)), names


SMALL_RUNS = (
    ({"layers": 24, "dim": 1024, "heads": 16, "vocab": 320}, 64, 8),
    ({"layers": 12, "dim": 768, "heads": 12, "vocab": 32000}, 512, 64),
)
"""(dimensions of the model, sequence length, global batch); the first run is so small that few devices are faster than
many."""


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "seq_len", "rows"), SMALL_RUNS)
def test_few_devices_have_no_part_with_a_faster_plan(dims, seq_len, rows):
    """On at most 64 devices no search of parts follows, so the search itself has to consider few devices."""
    topology = Topology.model_validate_json(package_data_path("topology", PAPER).read_text())
    batch = {"batch": {"global": rows}, "data": {"train": ["data"], "seq_len": seq_len}}
    run = Run.model_validate({"steps": 1, "model": {"dims": dims}, **batch})
    names = [node.id for node in topology.nodes]
    parts = [[name for name in names if name not in (names[0], names[-1])], names[1:], names[:4], names[-4:]]
    whole_s, *others_s = (step_s(run, topology.only(some)) for some in (names, *parts))
    assert whole_s <= MOST * min(others_s)
