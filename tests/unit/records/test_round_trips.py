"""What is written is read back equal, and half-written lines never stop a reader."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.atomic import append_line
from hpctrain.base.errors import FileError
from hpctrain.records.history.run_log import (
    BytesSent,
    Event,
    MetricRow,
    last_row_of_each_step,
    read_events,
    read_metrics,
)
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.records.run.run import Run, read_run

SIZES = st.integers(1, 512)
"""Two of them make a batch of at most BATCH_MAX sequences."""
POSITIVE = st.floats(1e-12, 1e6)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Values of a run file, optional keys now given and now not."""
    fixed = st.fixed_dictionaries(
        {"mode": st.just("fixed")},
        optional={"pp": SIZES, "dp": SIZES, "tp": SIZES, "micro_batch": st.none() | SIZES},
    )
    optimizer = st.fixed_dictionaries(
        {},
        optional={
            "lr": POSITIVE,
            "betas": st.tuples(POSITIVE, POSITIVE).map(list),
            "clip_norm": st.none() | POSITIVE,
            "warmup_steps": st.integers(0, 5000),
            "decay": st.sampled_from(["constant", "cosine", "linear"]),
        },
    )
    heads, half = draw(st.integers(1, 8)), draw(st.integers(1, 32))
    dims = {
        "layers": draw(SIZES),
        "dim": 2 * heads * half,
        "heads": heads,
        "vocab": draw(st.none() | st.integers(2, 9999)),
    }
    return draw(
        st.fixed_dictionaries(
            {
                "steps": SIZES,
                "model": st.sampled_from([{"preset": "tiny-1m"}, {"dims": dims}, {"import": "a.b:c"}]),
                "data": st.fixed_dictionaries(
                    {"train": st.just(["/a", "/b c"])}, optional={"seq_len": st.integers(8, 99)}
                ),
                "batch": st.fixed_dictionaries({"global": SIZES}),
            },
            optional={
                "name": NAMES,
                "seed": st.integers(0, 2**63 - 1),
                "cluster": st.fixed_dictionaries({}, optional={"time": st.just("1:30:00"), "nodes": SIZES}),
                "container": st.none() | st.fixed_dictionaries({"image": st.just("/images/a.sif")}),
                "parallel": st.just({"mode": "auto"}) | fixed,
                "optimizer": optimizer,
            },
        )
    )


@settings(ONE_FOLDER, max_examples=50)
@given(runs())
def test_a_run_is_read_back_equal_as_json_and_as_yaml(tmp_path: Path, value: dict[str, Any]) -> None:
    run = Run.from_json(value)
    path = tmp_path / "run.yaml"
    run.write(path)
    assert Run.read(path) == run
    again = read_run(path)
    assert again == run
    assert again.sha256() == run.sha256()


def test_a_null_that_is_not_the_default_survives(tmp_path: Path) -> None:
    value = {"steps": 1, "model": {"preset": "tiny-1m"}, "data": {"train": ["/a"]}, "batch": {"global": 1}}
    run = Run.from_json({**value, "optimizer": {"clip_norm": None}})
    run.write(tmp_path / "run.yaml")
    assert read_run(tmp_path / "run.yaml").optimizer.clip_norm is None


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Valid plans: any cut, any share of the batch, any rank order; stages of a rank next to each other or not."""
    pp, dp, tp, chunks = (draw(st.integers(1, 3)) for _ in range(4))
    stages = pp * chunks
    sizes = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    edges = [sum(sizes[:index]) for index in range(stages + 1)]
    replicas = []
    for replica in range(dp):
        micro_batch, micro_batches = draw(SIZES), draw(SIZES)
        devices = [[f"n{replica}-{stage % pp}:cpu{index}" for index in range(tp)] for stage in range(stages)]
        replicas.append(
            {
                "sequences": micro_batch * micro_batches,
                "micro_batch": micro_batch,
                "micro_batches": micro_batches,
                "devices": devices,
            }
        )
    ranks = [f"n{replica}-{rank}:cpu{index}" for replica in range(dp) for rank in range(pp) for index in range(tp)]
    return {
        "pp": pp,
        "dp": dp,
        "tp": tp,
        "stages": [{"layers": [edges[index], edges[index + 1]]} for index in range(stages)],
        "replicas": replicas,
        "ranks": draw(st.permutations(ranks)),
        "actions": draw(st.sampled_from([{}, {"0": {"0": ["0F0", "0B0"]}}])),
        "predicted": draw(st.sampled_from([None, {"step_time_s": {"total": 0.1}, "memory_bytes": {"n0-0:cpu0": 1e9}}])),
    }


@ONE_FOLDER
@given(plans())
def test_a_plan_is_read_back_equal(tmp_path: Path, value: dict[str, Any]) -> None:
    plan = Plan.from_json(value)
    plan.write(tmp_path / "plan.json")
    back = Plan.read(tmp_path / "plan.json")
    assert back == plan
    assert back.sha256() == plan.sha256()


@given(plans())
def test_the_mesh_of_a_plan_holds_each_rank_once_where_the_plan_says(value: dict[str, Any]) -> None:
    plan = Plan.from_json(value)
    mesh = plan.mesh()
    assert sorted(rank for row in mesh for column in row for rank in column) == list(range(plan.world_size))
    for stage, owner in plan.stage_owner().items():
        for replica in range(plan.dp):
            assert [plan.ranks[rank] for rank in mesh[owner][replica]] == plan.replicas[replica].devices[stage]
    assert plan.sequences == sum(replica["sequences"] for replica in value["replicas"])


ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 999))


@given(st.lists(st.lists(ACTIONS, max_size=6), max_size=4))
def test_a_schedule_is_read_back_from_its_text(rows: list[list[Action]]) -> None:
    schedule = Schedule(tuple(tuple(row) for row in rows))
    assert Schedule.parse(schedule.rows()) == schedule


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F0 ", "-1F0"])
def test_what_is_no_action_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="an action is written like 0F3"):
        Action.parse(text)


def row(step: int, generation: int) -> MetricRow:
    return MetricRow(
        step=step, generation=generation, time_s=1.0, step_time_s=0.5, loss=3.0 + generation, lr=1e-4, grad_norm=1.0,
        tokens=10, samples=2, tokens_per_s=20.0, bytes_sent=BytesSent(dp=7), stage_time_s=[0.1], bubble_fraction=0.0,
        micro_batches=[2],
    )  # fmt: skip


@ONE_FOLDER
@given(cut=st.integers(1, 200))
def test_rows_before_and_after_a_killed_writer_are_read(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(row(2, 0).to_json())
    path.write_text(json.dumps(row(1, 0).to_json()) + "\n" + whole[: min(cut, len(whole) - 1)])
    append_line(path, json.dumps(row(2, 1).to_json()))
    assert read_metrics(path) == [row(1, 0), row(2, 1)]


def test_a_file_that_is_not_there_yet_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_bytes_that_are_no_text_do_not_stop_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\x00\xff\xfe\n" + json.dumps(row(1, 0).to_json()).encode() + b"\n")
    assert read_metrics(path) == [row(1, 0)]


def test_the_history_of_a_run_is_its_last_generations() -> None:
    rows = [row(1, 0), row(2, 0), row(3, 0), row(2, 1), row(3, 1), row(4, 1)]
    assert [(r.step, r.generation) for r in last_row_of_each_step(rows)] == [(1, 0), (2, 1), (3, 1), (4, 1)]


def test_events_are_read_back_and_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    value = {"kind": "node_lost", "time_s": 1.0, "attempt": 0, "generation": 1, "node": "n0", "reason": "silent"}
    event = Event.from_json({**value, "data": {"x": None, "y": [1]}})
    append_line(tmp_path / "events.jsonl", json.dumps(event.to_json()))
    assert read_events(tmp_path / "events.jsonl") == [event]
    with pytest.raises(FileError, match="kind: found 'exploded'"):
        Event.from_json({**value, "kind": "exploded"})


@given(st.integers(1, 40), st.data())
def test_the_parts_of_a_cut_model_have_all_its_parameters(layers: int, data: st.DataObject) -> None:
    spec = DecoderSpec(layers=layers, dim=64, heads=4, kv_heads=2, vocab=300)
    cuts = sorted(data.draw(st.sets(st.integers(1, layers), max_size=4)) | {0, layers})
    parts = [spec.parameters(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert sum(parts) == spec.parameters()
    head = spec.forward_flops(2, 8, layers)
    blocks = spec.forward_flops(2, 8) - head
    assert [spec.forward_flops(2, 8, cut) for cut in cuts] == pytest.approx(
        [head + blocks * (layers - cut) / layers for cut in cuts]
    )
