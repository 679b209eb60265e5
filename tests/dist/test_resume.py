"""A run that was stopped and resumed is the run that was not: bit by bit on the same plan, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("resume_cases.py")


@pytest.mark.slow
def test_resuming_changes_nothing(tmp_path: Path) -> None:
    results = run_cases(SCRIPT, "all", 2, tmp_path)
    states, moved = results.pop("states"), results.pop("dp2, then pp2")
    assert set(results) == {"dp2 uneven", "pp2 V", "tp2"}
    for name, found in results.items():
        assert found == {"losses": True, "valid": True, "valid is quiet": True}, name
    assert states["compared"] > 50
    assert states["unequal"] == 0.0
    assert moved["loss"] <= 1e-6
    assert moved["draws"]
