"""A model that hpctrain did not write is the same model under every plan: of a factory, and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cases

CASES = Path(__file__).with_name("imported_cases.py")


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_an_imported_model_equals_one_process(tmp_path: Path) -> None:
    results = run_cases(CASES, "equivalence", 2, tmp_path)
    factory = {"pp2", "pp2 uneven", "pp2 embedding alone", "dp2", "tp2", "tp2, two stages"}
    plans = {"bloom": 3, "cohere2": 3, "granite": 2, "falcon": 1}
    assert set(results) == factory | {f"{kind} {number}" for kind, count in plans.items() for number in range(count)}
    for name, errors in results.items():
        assert errors["loss"] <= 1e-6, (name, errors)
        assert errors["gradient"] <= 1e-6, (name, errors)
        assert errors["norm"] <= 1e-6, (name, errors)
        assert errors["validation"] <= 1e-6, (name, errors)
        assert errors["parameter"] <= 1e-6, (name, errors)
