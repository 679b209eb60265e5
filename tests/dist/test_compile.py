"""`compile: true` compiles the blocks, and changes neither results nor names."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("compile_cases.py")


@pytest.mark.slow
@pytest.mark.requires("cxx")
def test_a_compiled_block_equals_the_plain_one(tmp_path: Path) -> None:
    found = run_cases(SCRIPT, "all", 1, tmp_path)
    assert found["names"]
    assert found["graphs"] == 1
    assert found["safe_path"] == "1"
    assert found["loss"] <= 1e-6
    assert found["gradient"] <= 1e-6
