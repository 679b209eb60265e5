"""An estimate without a measurement: FLOPs of the model, peaks of the GPUs, and what published runs reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.jobs.data_sheet_time import (
    LEAST_PARAMETERS,
    PLAN_ERROR,
    PLAN_ERRORS,
    REACHED_MFU,
    data_sheet_step_s,
    data_sheet_text,
    plan_error_text,
)
from hpctrain.jobs.job_price import JobPrice
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import DeviceType

PRICE = JobPrice(nodes=2, gpus=8, used_gpus=8, peaks=(("a100", 312e12),))


def run(preset: str = "large-1.3b", precision: str = "bf16") -> Run:
    text = {"steps": 10, "precision": precision, "data": {"train": ["/d"], "seq_len": 2048}, "batch": {"global": 64}}
    return Run.from_json({**text, "model": {"preset": preset}})


def estimate(asked: Run, price: JobPrice = PRICE) -> tuple[float, tuple[float, float]] | str:
    return data_sheet_step_s(asked, asked.spec().model_copy(update={"vocab": 32_000}), price)


def test_the_step_takes_the_models_flops_at_what_published_runs_reached() -> None:
    asked = run()
    spec = asked.spec().model_copy(update={"vocab": 32_000})
    found = estimate(asked)
    assert not isinstance(found, str)
    step_s, (fast_s, slow_s) = found
    flops = 3 * spec.forward_flops(64, 2048)
    assert flops == pytest.approx(6 * spec.parameters() * 64 * 2048, rel=0.2)
    assert step_s == pytest.approx(flops / (8 * 312e12 * REACHED_MFU[1]))
    assert fast_s / step_s == pytest.approx(REACHED_MFU[1] / REACHED_MFU[2])
    assert slow_s / step_s == pytest.approx(REACHED_MFU[1] / REACHED_MFU[0])
    assert data_sheet_text(PRICE).endswith("8 × a100 at 25 % of their peak (6 % to 51 %, as 8 of 10 published runs)")


def test_of_two_kinds_the_range_reaches_from_the_fastest_to_the_slowest() -> None:
    both = estimate(run(), JobPrice(2, 8, 8, (("v100", 125e12), ("a100", 312e12))))
    slow, fast = estimate(run(), JobPrice(2, 8, 8, (("v100", 125e12),))), estimate(run())
    assert not any(isinstance(item, str) for item in (both, slow, fast))
    assert both[1] == (pytest.approx(fast[1][0]), pytest.approx(slow[1][1]))  # type: ignore[index]
    assert fast[0] < both[0] < slow[0]  # type: ignore[index, operator]


@pytest.mark.parametrize(
    ("asked", "price", "why"),
    [
        (run(precision="fp32"), PRICE, "fp32"),
        (run("tiny-1m"), PRICE, "so small a model"),
        (run(), JobPrice(2, 0, 0, ()), "on CPUs"),
        (run(), JobPrice(2, 8, 8, ()), "no data sheet"),
    ],
)
def test_what_no_published_run_resembles_gets_no_number(asked: Run, price: JobPrice, why: str) -> None:
    found = estimate(asked, price)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.requires("measured_runs")
def test_the_constants_are_those_of_the_published_runs(measured_runs: Path) -> None:
    from tools.published_runs.utilization import best_runs, summarize

    record = summarize(best_runs(measured_runs.parent))
    assert tuple(round(value, 3) for value in record["quantiles"]) == REACHED_MFU
    assert record["least_parameters"] >= LEAST_PARAMETERS
    assert sum(row["problems"] for row in record["publications"].values()) == 319
    assert round(record["within_of_problems"], 2) == 0.88
    assert PLAN_ERROR[0] < 1 < PLAN_ERROR[1]


@pytest.mark.parametrize(
    ("names", "gpus", "unknown"),
    [
        (["NVIDIA A100-SXM4-80GB"], ["a100"], ""),
        (["Tesla V100-PCIE-32GB", "NVIDIA H100 80GB HBM3"], ["v100", "h100"], ""),
        (["Tesla T4", "NVIDIA GeForce RTX 4090"], ["t4"], "type1"),
        (["NVIDIA GeForce RTX 4090", "Intel Xeon"], [], "type0 or type1"),
    ],
)
def test_the_error_of_predictions_is_known_only_for_gpus_of_published_runs(
    names: list[str], gpus: list[str], unknown: str
) -> None:
    text = plan_error_text({f"type{number}": DeviceType(kind="cuda", name=name) for number, name in enumerate(names)})
    for number, gpu in enumerate(gpus):
        low, high = PLAN_ERRORS[gpu,]
        assert f"{low:.2f} to {high:.2f} times on type{number}" in text
    assert ("not known" in text) == (not gpus)
    assert f"used {unknown}." in text if unknown else "used" not in text


def test_every_range_of_errors_is_one() -> None:
    assert all(0 < low < high for low, high in PLAN_ERRORS.values())
