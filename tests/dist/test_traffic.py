"""Bytes of tensor parallelism are counted wherever DTensor sends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("traffic_cases.py")


@pytest.mark.slow
def test_the_counter_agrees_with_the_formula_and_with_gloo(tmp_path: Path) -> None:
    results = run_cases(SCRIPT, "all", 2, tmp_path)
    assert len(results) == 15
    for name, found in results.items():
        assert found["counted"] == found["expected"] > 0, (name, found)
        # gloo has no reduce-scatter of its own: it sends an all-reduce, twice the ring's bytes.
        if name != "scatter" and not name.startswith("sequence"):
            assert found["reported"] == found["expected"], (name, found)
