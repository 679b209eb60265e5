"""What energy a run used, by metrics-nodes.jsonl and the times of its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import UntrustedError
from hpctrain.records.history.node_log import NODE_LOG, GpuFigures, NodeRow, read_node_log
from hpctrain.records.history.run_log import BytesSent, MetricRow
from hpctrain.records.run.energy import Energy
from hpctrain.report.energy import run_energy

START = 1_700_000_000.0


def node_row(end_s: float, joules: float | None, node: str = "n0", **fields: Any) -> NodeRow:
    """A line about the 10 s before `end_s` after `START`; `joules` of one processor."""
    cpu = None if joules is None else {"package-0": joules}
    keys = {"seconds": 10.0, "attempt": 0, "machine": node, "cpu_j": cpu} | fields
    return NodeRow(time_s=START + end_s, node=node, **keys)


def step_row(step: int, end_s: float, seconds: float = 1.0, generation: int = 1, tokens: int = 100) -> MetricRow:
    return MetricRow(
        step=step, generation=generation, time_s=START + end_s, step_time_s=seconds, loss=1.0, lr=0.1, tokens=tokens,
        samples=step, tokens_per_s=tokens / seconds, bytes_sent=BytesSent(), stage_time_s=[1.0], micro_batches=[1],
    )  # fmt: skip


def test_a_step_a_token_and_the_whole_run() -> None:
    rows = [node_row(10 * index, 500.0 if index <= 2 else 1000.0) for index in range(1, 5)]
    steps = [step_row(1, 5.0, 5.0), step_row(2, 15.0), step_row(2, 25.0, 2.0, generation=2), step_row(3, 40.0, 5.0)]
    energy = run_energy(rows, steps, Energy(carbon_intensity=360.0))
    assert energy is not None
    assert energy.total_j == pytest.approx(3000.0)
    assert energy.steps_j == pytest.approx(5 * 50 + 2 * 100 + 5 * 100)
    assert energy.step_j == pytest.approx(950 / 3)
    assert energy.token_j == pytest.approx(950 / 300)
    assert energy.carbon_g == pytest.approx(0.3)
    assert energy.power_w == pytest.approx(100.0)
    assert (energy.gpu_j, energy.host_j) == (None, pytest.approx(3000.0))
    assert energy.node_hours == pytest.approx(40 / 3600)
    assert "gpu_j" not in energy.to_json()


def test_virtual_nodes_of_one_machine_count_once_and_real_nodes_add_up() -> None:
    virtual = [node_row(end, 500.0, node, machine="m") for end in (10, 20) for node in ("n0", "n1")]
    shifted = [node_row(end, 500.0, "n2", machine="m") for end in (15, 25)]
    energy = run_energy([*virtual, *shifted], [step_row(1, 20.0, 10.0)], Energy())
    assert energy is not None
    assert energy.total_j == pytest.approx(25 * 50.0)
    assert energy.step_j == pytest.approx(500.0)
    assert energy.power_w == pytest.approx(50.0)
    real = run_energy([node_row(end, 500.0, node) for end in (10, 20) for node in ("n0", "n1")], [], Energy())
    assert real is not None
    assert (real.total_j, real.power_w) == (pytest.approx(2000.0), pytest.approx(100.0))


def test_gpus_and_processors_are_apart_and_psys_counts_without_gpus_alone() -> None:
    domains = {"package-0": 100.0, "dram-0": 20.0, "psys": 300.0}
    gpu = GpuFigures(device="cuda0", address="0000:4e:00.0", energy_j=4000.0)
    with_gpu = run_energy([node_row(10, None, cpu_j=domains, gpus=[gpu])], [], Energy())
    assert with_gpu is not None
    assert (with_gpu.gpu_j, with_gpu.host_j, with_gpu.total_j) == (4000.0, 120.0, 4120.0)
    assert node_row(10, None, cpu_j=domains).host_j() == 300.0
    assert node_row(10, None, cpu_j=domains | {"psys": 0.0}).host_j() == 120.0  # some machines count nothing in it
    assert node_row(10, None).host_j() is None


def test_where_nothing_could_be_read_nothing_is_said() -> None:
    silent = GpuFigures(device="cuda0", address="0000:4e:00.0", temperature_c=60)
    assert run_energy([], [step_row(1, 5.0)], Energy(carbon_intensity=1.0)) is None
    assert run_energy([node_row(10, None, gpus=[silent])], [step_row(1, 5.0)], Energy()) is None
    energy = run_energy([node_row(10, 500.0), node_row(40, 500.0)], [step_row(1, 20.0, 5.0)], Energy())
    assert energy is not None
    assert (energy.step_j, energy.token_j, energy.carbon_g) == (None, None, None)
    assert energy.total_j == pytest.approx(1000.0)


def test_carbon_by_the_hour_of_the_day() -> None:
    midnight = START - START % 86_400 - START
    row = node_row(midnight + 3600 + 900, 3.6e6, seconds=1800.0)  # 1 kWh from 00:45 to 01:15
    hours = [100.0, 300.0, *[0.0] * 22]
    energy = run_energy([row], [], Energy(carbon_intensity=hours))
    assert energy is not None
    assert energy.carbon_g == pytest.approx(200.0)


@pytest.mark.parametrize("wrong", [-1.0, 5001.0, [100.0] * 23, [100.0] * 25, "much", float("nan")])
def test_no_other_intensity_is_taken(wrong: object) -> None:
    with pytest.raises(ValueError, match="carbon_intensity"):
        Energy.model_validate({"carbon_intensity": wrong})


def test_lines_that_are_garbage_are_left_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    good = node_row(10, 5.0).to_json()
    bad = [good | {"seconds": 0}, good | {"cpu_j": {"package-0": -1}}, good | {"further": 1}, {"schema": "other"}]
    lines = [json.dumps(value) for value in [*bad, good]]
    (tmp_path / NODE_LOG).write_text("\n".join([*lines, "[1]", "{", lines[-1][:40]]))
    assert read_node_log(tmp_path) == [node_row(10, 5.0)]
    (tmp_path / NODE_LOG).chmod(0o666)
    with pytest.raises(UntrustedError):
        read_node_log(tmp_path)
