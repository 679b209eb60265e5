"""Our tables, torch's own order and the recorded tables are the same."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hpctrain.schedule.generate import make_schedule

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "schedules.json"
CASES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case["schedule"])))
def test_tables_equal_the_recorded_ones(case):
    assert [" ".join(row) for row in make_schedule(*case["schedule"]).rows()] == case["ranks"]


@pytest.mark.slow
def test_recorded_tables_are_the_order_that_torch_runs():
    specification = importlib.util.spec_from_file_location("torch_order", Path(__file__).with_name("torch_order.py"))
    torch_order = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(torch_order)
    found = [
        {"schedule": list(case), "ranks": [" ".join(row) for row in torch_order.torch_rows(*case)]}
        for case in torch_order.CASES
    ]
    assert found == CASES
