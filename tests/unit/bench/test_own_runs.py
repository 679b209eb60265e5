"""`hpctrain bench plan --own`: what it says of runs whose truth is known; the training itself is the worker's."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console
from steps_made import rows_made, truth

from hpctrain.bench.planner.own_runs import FITTED, PLANS, OwnRunSettings, Trained, compare, tried_steps
from hpctrain.cli.bench.group import bench_command as command
from hpctrain.cli.bench.plan import show_own_runs
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

SPECS = (DecoderSpec(layers=4, dim=64, heads=2, vocab=320), DecoderSpec(layers=4, dim=128, heads=4, vocab=320))
DEVICE = Device(id="cpu0", type="cpu", flops={"fp32": 1e10}, memory_bytes=8e9, memory_bytes_per_s=5e9, launch_s=1e-6)


def topology(nodes: int, devices: int) -> Topology:
    cut = [DEVICE.model_copy(update={"id": f"cpu{index}"}) for index in range(devices)]
    figures = {"addr": "127.0.0.1", "devices": cut, "intra_bytes_per_s": 1e9}
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=f"local{number}", **figures) for number in range(nodes)],
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=4e-5, beta_s_per_byte=1e-9, pairs=1)]),
    )


def test_runs_that_the_profile_was_not_fitted_to_are_scored_before_and_after_it() -> None:
    settings = OwnRunSettings(rows=8, seq_len=32, specs=SPECS)
    real = truth(compute={"cpu": 1.5}, tensor_parallel=2.0, communication=0.6, update=0.6, process_bytes={"cpu": 3.5e8})
    trained = []
    for spec in SPECS:
        run = Run.model_validate(
            {"steps": 9, "model": {"dims": spec.model_dump()}, "data": {"train": ["d"], "seq_len": 32},
             "batch": {"global": 8}}
        )  # fmt: skip
        for name, case in PLANS.items():
            plan, probed = case.plan(spec.layers, 8), topology(case.nodes, case.devices_per_node)
            assert plan.world_size == case.world
            rows = rows_made(plan, run, probed, real, settings.steps + tried_steps(plan))
            trying = [row.model_copy(update={"step_time_s": 9.0}) for row in rows[: len(rows) - settings.steps]]
            trained.append(Trained(name, spec, run, plan, probed, [*trying, *rows[len(trying) :]], 0.5))
    record = compare(trained, settings)
    assert [row["case"] for row in record["rows"] if row["fitted"]] == list(FITTED)
    assert {row["model"] for row in record["rows"] if row["fitted"]} == {"4 × 64"}
    errors = record["error_pct"]
    assert errors["before"]["runs"] == errors["after"]["runs"] == len(trained) - len(FITTED)
    assert errors["before"]["mean"] > 20
    # Dispatch under shared matrices was fitted with computing unknown, so it is not exact.
    unshared = [row for row in record["rows"] if row["case"] != "tp2"]
    assert all(abs(row["profiled_error_pct"]) < 3 for row in unshared)
    assert record["memory_error_pct"]["before"]["mean"] > 10
    assert record["memory_error_pct"]["after"]["mean"] == pytest.approx(0, abs=0.01)
    stream = io.StringIO()
    show_own_runs(record, Console(file=stream, width=140))
    said = stream.getvalue()
    assert said.count("fitted to") == len(FITTED) + 2
    assert f"{len(trained) - len(FITTED)} runs not fitted to" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--own", "--search-limit", "1"], "--search-limit: not with --own"),
        (["--steps", "20"], "--steps: only with --own"),
    ],
)
def test_options_of_the_other_comparison_are_refused(argv: list[str], said: str) -> None:
    result = CliRunner().invoke(command, ["plan", *argv])
    assert said in str(result.exception)
