"""Every plan is the same model: loss, gradients, norm and parameters equal those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")


def run_cases(what: str, world: int, folder: Path) -> dict[str, dict[str, float]]:
    """One launch of `world` processes for all cases of that size."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES), what, str(world), str(folder)],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("world", "least"), [(1, 2), (2, 14), (4, 5)])
def test_equals_one_process(world: int, least: int, tmp_path: Path) -> None:
    results = run_cases("equivalence", world, tmp_path)
    assert len(results) >= least
    for name, errors in results.items():
        assert errors["loss"] <= 1e-6, (name, errors)
        assert errors["gradient"] <= 1e-6, (name, errors)
        assert errors["norm"] <= 1e-6, (name, errors)
        assert errors["validation"] <= 1e-6, (name, errors)
        assert errors["parameter"] <= 1e-5, (name, errors)


@pytest.mark.slow
def test_a_checkpoint_of_one_plan_loads_into_every_other(tmp_path: Path) -> None:
    run_cases("save", 4, tmp_path)
    names: set[str] = set()
    for world in (1, 2, 4):
        errors = run_cases("load", world, tmp_path)
        names |= set(errors)
        assert all(error == 0.0 for error in errors.values()), errors
    assert {"one", "pp2 uneven", "tp2", "dp2 tp2", "pp4"} <= names
