"""Profiles: what the steps of a run say of the constants, and what predictions make of it."""

from __future__ import annotations

import json

import pytest
from steps_made import BASE_BYTES, rows_made, truth, write_generation

from hpctrain.base.errors import FileError, InputError
from hpctrain.planner import make_plan
from hpctrain.planner.cost.memory import PROCESS_BYTES
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import fit_profile, learned_profile, merge_profiles
from hpctrain.planner.replan.factor import compute_factor
from hpctrain.planner.replan.replan import replan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import LARGEST_FACTOR

pytestmark = pytest.mark.usefixtures("short_annealing")

REAL = truth(compute={"type1.0": 1.6}, communication=0.7, update=0.7, tensor_parallel=2.5, process_bytes={"cpu": 3.4e8})


def fixed(**degrees):
    return {"parallel": {"mode": "fixed", **degrees}}


@pytest.mark.parametrize(
    "degrees",
    [{"dp": 2}, {"pp": 2, "micro_batch": 2}, {"pp": 2, "schedule": "zbv", "micro_batch": 2}, {"dp": 2, "zero": 1}],
)
def test_the_factors_of_a_cluster_are_found_and_predict_its_steps(topology, run, degrees):
    asked, made = run(**fixed(**degrees)), topology(default=(2e-3, 5e-9))
    plan = make_plan(asked, asked.spec(), made)
    rows = rows_made(plan, asked, made, REAL)
    found = fit_profile(plan, asked, asked.spec(), made, rows)
    assert found.compute == pytest.approx({"type1.0": 1.6})
    assert found.communication == pytest.approx(0.7)
    assert found.update == pytest.approx(0.7)
    assert found.tensor_parallel is None
    assert "no matrix" in found.remarks["tensor_parallel"]
    assert "one factor" in found.remarks["update"]
    assert found.process_bytes == pytest.approx({"cpu": 3.4e8})
    scene = layout_of_plan(asked, asked.spec(), plan.model_copy(update={"profile": found}), made)
    assert predict(scene.cost, scene.layout, whole=True).total == pytest.approx(rows[0].step_time_s)
    assert max(scene.layout.memory(scene.cost.memory).values()) == pytest.approx(rows[0].memory_bytes_max)
    again = make_plan(asked, asked.spec(), made, profile=found).predicted
    assert again.bound_s <= again.step_time_s["total"] <= rows[0].step_time_s * 1.000001


def test_with_shared_matrices_the_dispatch_is_learnt_and_the_computing_is_not(topology, run):
    asked, made = run(rows=64, **fixed(tp=2)), topology()
    plan = make_plan(asked, asked.spec(), made)
    real = truth(tensor_parallel=2.5)
    found = fit_profile(plan, asked, asked.spec(), made, rows_made(plan, asked, made, real))
    assert found.tensor_parallel == pytest.approx(2.5)
    assert found.compute == {}
    assert "sharded tensors" in found.remarks["compute"]
    assert found.communication is None, "nothing but the norm's sum was sent between stages or replicas"
    assert found.update is None
    assert "too little" in found.remarks["update"]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2, "zero": 3}])
def test_on_gpus_the_whole_step_gives_the_factor_of_computing_where_stages_hold_messages(topology, run, degrees):
    asked, made = run(**fixed(**degrees)), topology(kind="cuda", default=(1e-6, 1e-12))
    plan = make_plan(asked, asked.spec(), made)
    rows = rows_made(plan, asked, made, truth(compute={"type1.0": 1.6}))
    found = fit_profile(plan, asked, asked.spec(), made, rows)
    assert found.compute == pytest.approx({"type1.0": 1.6})
    assert "whole step" in found.remarks["compute"]
    assert found.communication is found.update is found.tensor_parallel is None
    slow = topology(kind="cuda", default=(1.0, 1e-6))
    rows = rows_made(plan, asked, slow, truth(compute={"type1.0": 1.6}))
    found = fit_profile(plan, asked, asked.spec(), slow, rows)
    assert found.compute == {}
    assert "too little" in found.remarks["compute"]


@pytest.mark.parametrize(
    ("share", "factor"), [(1.0, 2.0), (0.75, (2**0.9 - 0.25) / 0.75), (0.6, (2 ** (9 / 13) - 0.4) / 0.6), (0.4, None)]
)
def test_the_more_of_a_step_is_computing_the_more_of_its_deviation_computing_explains(share, factor):
    found, remark = compute_factor(lambda times: 3.0 * (share * times + 1 - share), measured_s=6.0)
    assert found == (factor if factor is None else pytest.approx(factor, rel=1e-5))
    assert bool(remark) == (factor is None)


def test_a_factor_corrects_another_model_and_plan_on_such_devices(topology, run):
    asked, made = run(**fixed(tp=2)), topology(kind="cuda", default=(1e-6, 1e-12))
    plan = make_plan(asked, asked.spec(), made)
    found = fit_profile(plan, asked, asked.spec(), made, rows_made(plan, asked, made, truth(compute={"type1.0": 1.6})))
    other = run(**fixed(dp=2), dims={"layers": 4, "dim": 256})
    plain, scaled = (make_plan(other, other.spec(), made, profile=profile) for profile in (None, found))
    assert scaled.predicted.step_time_s["compute"] == pytest.approx(1.6 * plain.predicted.step_time_s["compute"])


def test_zero_2_hides_computing_and_its_messages_are_learnt(topology, run):
    asked, made = run(**fixed(dp=2, zero=2)), topology(default=(2e-3, 5e-9))
    plan = make_plan(asked, asked.spec(), made)
    rows = rows_made(plan, asked, made, truth(communication=1.8, update=1.8))
    found = fit_profile(plan, asked, asked.spec(), made, rows)
    assert found.compute == {}
    assert "ZeRO" in found.remarks["compute"]
    assert found.communication == pytest.approx(1.8)


def test_of_compressed_sums_nothing_is_learnt(topology, run):
    asked, made = run(compression={"mode": "bf16"}, **fixed(dp=2)), topology(default=(2e-3, 5e-9))
    plan = make_plan(asked, asked.spec(), made)
    found = fit_profile(plan, asked, asked.spec(), made, rows_made(plan, asked, made, REAL))
    assert found.compute == pytest.approx({"type1.0": 1.6})
    assert (found.communication, found.update) == (None, None)
    assert found.remarks["communication"] == "sums were compressed"


def test_slow_steps_and_skipped_ones_do_not_count(topology, run):
    asked, made = run(**fixed(dp=2)), topology()
    plan = make_plan(asked, asked.spec(), made)
    rows = rows_made(plan, asked, made, REAL)
    clean = fit_profile(plan, asked, asked.spec(), made, rows)
    slow = {"step_time_s": 9.0, "stage_time_s": [8.0]}
    for number in (0, 1, 2, 3, 4, 9, 17, 30):
        rows[number] = rows[number].model_copy(update=slow)
    rows[12:24] = [row.model_copy(update=slow | {"skipped": True}) for row in rows[12:24]]
    found = fit_profile(plan, asked, asked.spec(), made, rows)
    assert (found.compute, found.update) == (clean.compute, clean.update)


def test_replicas_of_unlike_devices_leave_computing_unknown(topology, run):
    asked, made = run(rows=12, **fixed(dp=2)), topology((1.0, 0.5))
    plan = make_plan(asked, asked.spec(), made)
    found = fit_profile(plan, asked, asked.spec(), made, rows_made(plan, asked, made, truth()))
    assert found.compute == {}
    assert "unlike" in found.remarks["compute"]


def test_factors_stay_within_reason_and_say_so(topology, run):
    asked, made = run(**fixed(pp=2)), topology()
    plan = make_plan(asked, asked.spec(), made)
    rows = rows_made(plan, asked, made, truth())
    slow = [row.model_copy(update={"stage_time_s": [50 * s for s in row.stage_time_s]}) for row in rows]
    found = fit_profile(plan, asked, asked.spec(), made, slow)
    assert found.compute == {"type1.0": LARGEST_FACTOR}
    assert "measured 50" in found.remarks["compute"]
    asked, made = run(**fixed(dp=2)), topology(default=(2e-3, 5e-9))
    plan = make_plan(asked, asked.spec(), made)
    short = [row.model_copy(update={"step_time_s": 1e-6}) for row in rows_made(plan, asked, made, truth())]
    assert "limited to 0.2" in fit_profile(plan, asked, asked.spec(), made, short).remarks["update"]


def test_memory_is_never_below_what_a_worker_held_before_its_model(topology, run):
    asked, made = run(**fixed(pp=2)), topology()
    plan = make_plan(asked, asked.spec(), made)
    small = [row.model_copy(update={"memory_bytes_max": 1e8}) for row in rows_made(plan, asked, made, truth())]
    assert fit_profile(plan, asked, asked.spec(), made, small).process_bytes == {"cpu": BASE_BYTES}
    silent = [row.model_copy(update={"placement": None}) for row in small]
    found = fit_profile(plan, asked, asked.spec(), made, silent)
    assert found.process_bytes == {}
    again = make_plan(asked, asked.spec(), made, profile=found)
    assert min(again.predicted.memory_bytes.values()) > PROCESS_BYTES["cpu"]


@pytest.mark.parametrize(
    ("count", "change", "said"),
    [
        (12, {}, "found 12 steps of generation 0"),
        (0, {}, "found no step"),
        (40, {"tokens": 1}, "has 1 tokens"),
        (40, {"stage_time_s": [1.0] * 7}, "has 7 stages"),
    ],
)
def test_steps_that_say_nothing_are_refused(topology, run, count, change, said):
    asked, made = run(), topology()
    plan = make_plan(asked, asked.spec(), made)
    rows = [row.model_copy(update=change) for row in rows_made(plan, asked, made, truth(), count)]
    with pytest.raises(InputError, match=said):
        fit_profile(plan, asked, asked.spec(), made, rows, "runs/a")


def test_several_profiles_are_one_with_what_each_knows():
    one = truth(compute={"a": 1.0}, update=2.0, process_bytes={"cpu": 3e8}, remarks={"tensor_parallel": "none ran"})
    two = truth(compute={"a": 2.0, "b": 4.0}, tensor_parallel=3.0, process_bytes={"cpu": 4e8}, remarks={"update": "x"})
    both = merge_profiles([one, two])
    assert both.compute == {"a": 1.5, "b": 4.0}
    assert (both.update, both.tensor_parallel, both.communication) == (2.0, 3.0, None)
    assert both.process_bytes == {"cpu": 4e8}
    assert both.remarks == {}
    assert both.generations == [0, 0]


def test_remarks_on_known_factors_say_for_which_generations_they_hold():
    limit, shared = "limited to 5: measured 7.1", "one factor for communication and update"
    one = truth(update=5.0, compute={"a": 5.0}, remarks={"update": limit, "compute": f"a: {limit}"})
    two = truth(update=2.0, compute={"a": 5.0}, remarks={"communication": "too little", "compute": f"a: {limit}"})
    three = truth(update=3.0, remarks={"compute": "sharded tensors", "update": shared, "communication": "compressed"})
    numbered = [one, two.model_copy(update={"generations": [1]}), three.model_copy(update={"generations": [2]})]
    merged = merge_profiles(numbered)
    assert merged.update == 3.0
    assert merged.remarks == {
        "communication": "compressed",
        "update": f"generation 0: {limit}; generation 2: {shared}",
        "compute": f"generation 0, 1: a: {limit}",
    }
    assert merge_profiles(numbered[:2]).remarks["compute"] == f"a: {limit}"


def test_a_run_folder_gives_the_profile_of_its_long_generations(topology, run, tmp_path):
    asked, made = run(**fixed(dp=2)), topology()
    plan = make_plan(asked, asked.spec(), made)
    write_generation(tmp_path, plan, asked, made, REAL, 60)
    write_generation(tmp_path, plan, asked, made, truth(compute={"type1.0": 4.0}), 10, number=1)
    (tmp_path / "metrics.jsonl").open("a").write('[1]\n{"gen')
    found = learned_profile(tmp_path, asked, asked.spec())
    assert (found.generations, found.source) == ([0], tmp_path.name)
    assert found.compute == pytest.approx({"type1.0": 1.6})
    plan.model_copy(update={"topology_sha256": "other"}).write(tmp_path / "generations" / "plan-000000.0000.json")
    with pytest.raises(InputError, match=r"generation 1 made 10 steps, at least 50.*another topology"):
        learned_profile(tmp_path, asked, asked.spec())
    (tmp_path / "topology.json").unlink()
    with pytest.raises(FileError):
        learned_profile(tmp_path, asked, asked.spec())


def test_a_replan_keeps_the_profile_also_without_degrees_by_hand(topology, run):
    asked, made = run(**fixed(pp=3)), topology((1.0, 1.0))
    plan, remark = replan(asked, asked.spec(), made, 1, profile=REAL)
    assert "without parallel.mode fixed" in remark
    assert plan.profile == REAL
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
