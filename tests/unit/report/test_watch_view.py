"""What `hpctrain watch` draws, compared with texts in tests/golden/watch, and that it fits into any terminal.

Write the golden texts again after a wanted change: python -m tests.unit.report.test_watch_view
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Group
from run_folders import RUN, event, submitted_run

from hpctrain.base.owned_files import owner_only
from hpctrain.cli.views.console import Console
from hpctrain.records.format.file_tail import sampled_values
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.node_log import NODE_LOG, GpuFigures, NodeRow
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import BytesSent, CompressionFigures, Event, MetricRow
from hpctrain.report.binned_curve import BINS_MAX, BinnedCurve, sparkline
from hpctrain.report.live_run import METRICS_BYTES, LiveRun
from hpctrain.report.status import RunStatus
from hpctrain.report.watch.changes import PlainView
from hpctrain.report.watch.rank_view import slowest_text, waits_text
from hpctrain.report.watch.run_view import WatchedFigures, node_states, run_view, sent_words
from hpctrain.report.watch.sweep_view import sweep_view
from hpctrain.report.watch.text_fit import Screen
from hpctrain.slurm.job import JobInfo, job_of_columns

GOLDEN = Path(__file__).parents[2] / "golden" / "watch"
START_S = 1_795_000_000.0
STEPS = 500
NOW_S = START_S + STEPS + 1
SCREENS = {
    "80x24": Screen(80, 24),
    "120x40": Screen(120, 40),
    "40x8": Screen(40, 8),
    "80x24-ascii": Screen(80, 24, ascii_only=True),
}
STATUS = RunStatus(
    state="running", reason="step 30 done in 1 s", name="gpt", attempt=1, generation=2, step=30, steps=90,
    nodes=["n1", "n2"], recoveries=1, lost_steps=0, loss=2.5, tokens_per_s=1200.0, eta_s=65.0,
)  # fmt: skip
BEGIN = event("attempt_started", -1, nodes=["n1", "n2", "n3"])


def step_row(step: int) -> MetricRow:
    return MetricRow(
        step=step, generation=1, time_s=START_S + step, step_time_s=1.0, loss=2 + 3 * math.exp(-step / 100), lr=0.1,
        tokens=4096, samples=8 * step, tokens_per_s=4096 + 500 * math.sin(step / 20),
        bytes_sent=BytesSent(dp=12_000_000, pp=3_000_000), stage_time_s=[0.5, 0.6], micro_batches=[4],
        compression=CompressionFigures(density=0.01, residual_norm_ratio=0.52), memory_bytes_max=3.2e9, mfu=0.312,
        valid_loss=2.1 if step == 400 else None,
    )  # fmt: skip


def rank_row(rank: int, excess: float = 0.0, stages: int = 2, **more: Any) -> RankRow:
    stage = rank % stages
    return RankRow(
        step=STEPS, steps=10, generation=1, rank=rank, device=f"gpu{rank // 4 + 1}:cpu{rank % 4}", stages=[stage],
        forward_s=[0.2 * (1 + excess) + 0.01 * stage], backward_s=[0.4 * (1 + excess)], memory_bytes=1e9 + rank,
        **{"wait_pp_s": 0.1, "wait_dp_s": 0.15, "wait_world_s": 0.02, "wait_device_s": 0.0, "hidden_dp_s": 0.08} | more,
    )  # fmt: skip


def append(path: Path, items: list[Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(item.to_json()) + "\n" for item in items)


def made_run(runs: Path) -> Path:
    """The folder of a run of 500 steps on 8 devices of two nodes, one of which is slow."""
    folder = submitted_run(runs, "17")
    values = {**RUN, "steps": 2000, "energy": {"carbon_intensity": 380}, "recovery": {"snapshot_every": 10}}
    (folder / "run.yaml").write_text(json.dumps(values))
    nodes = ["gpu1", "gpu2"]
    story: list[tuple[float, Event]] = [
        (0, event("attempt_started", -1, "attempt 0 on 2 nodes", nodes=nodes)),
        (1, event("planned", -1, "pp 2 × dp 4 × tp 1 on 2 nodes")),
        (2, event("generation_started", 0, members=nodes, pp=2, dp=4, tp=1)),
        (90, event("node_lost", 0, node="gpu2")),
        (95, event("generation_started", 1, members=nodes, pp=2, dp=4, tp=1, restore_step=80)),
        (97, event("recovered", 1, step=81, seconds=7.0)),
    ]
    story += [
        (step, event("checkpoint_saved", 1, step=step, seconds=0.9, size_bytes=26_000_000))
        for step in range(100, STEPS, 60)
    ]
    append(folder / "events.jsonl", [item.model_copy(update={"time_s": START_S + at}) for at, item in story])
    append(folder / "metrics.jsonl", [step_row(step) for step in range(1, STEPS + 1)])
    layers = [LayerFigures(layer=str(block), numbers=1000, gradient_density=0.1 + 0.05 * block) for block in range(6)]
    slow = {5: 0.34, 2: 0.02}
    append(
        folder / RANK_LOG,
        [rank_row(rank, slow.get(rank, 0.0), layers=layers[3 * (rank % 2) :][:3]) for rank in range(8)],
    )
    gpu = GpuFigures(device="cuda0", address="0000:4e:00.0", energy_j=3000.0, use=0.93, temperature_c=71.0)
    append(
        folder / NODE_LOG,
        [
            NodeRow(
                time_s=START_S + end_s, seconds=10.0, attempt=0, node=node, machine=node, cpu_j={"package-0": 900.0},
                gpus=[gpu],
            )
            for end_s in range(10, STEPS + 1, 10)
            for node in nodes
        ],
    )  # fmt: skip
    return folder


def slurm_job(end_s: float) -> JobInfo:
    return replace(job_of_columns({"JobArrayID": "17", "State": "RUNNING"}), start_s=START_S, end_s=end_s)


def figures_of(folder: Path, **changes: Any) -> WatchedFigures:
    live = LiveRun(folder)
    live.read()
    live.held = True
    status = replace(live.status(NOW_S), job_state="RUNNING")
    values = {"live": live, "status": status, "job": slurm_job(NOW_S + 3600), "job_id": "17", "now": NOW_S}
    return WatchedFigures(**values | changes)


def drawn(figures: WatchedFigures, screen: Screen) -> list[str]:
    """The lines of a view as a terminal gets them, through the console of all views."""
    out = io.StringIO()
    console = Console(file=out, width=screen.width, no_color=True, highlight=False)
    console.print(Group(*run_view(figures, screen)))
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", SCREENS)
def test_the_view_of_a_run_is_the_golden_one(folder: Path, name: str) -> None:
    lines = drawn(figures_of(folder), SCREENS[name])
    assert [line.rstrip() for line in lines] == (GOLDEN / f"{name}.txt").read_text().splitlines()


def test_what_was_not_measured_has_no_line(tmp_path: Path) -> None:
    bare = submitted_run(tmp_path, None, event("attempt_started", -1, nodes=["gpu1"]))
    shown = "\n".join(drawn(figures_of(bare, job=None, job_id=None), Screen(80, 24)))
    assert "gpt  starting" in shown
    assert [
        word for word in ("loss", "speed", "waits", "sent", "memory", "energy", "stage", "limit") if word in shown
    ] == []


def test_a_time_limit_before_the_last_step_is_said_first(folder: Path) -> None:
    early = drawn(figures_of(folder, job=slurm_job(NOW_S + 600)), Screen(100, 4))
    assert "10 min 0 s to the job's time limit, 15 min 0 s before the last step" in early[2]
    late = "\n".join(drawn(figures_of(folder, job=slurm_job(NOW_S + 3600)), Screen(100, 24)))
    assert "1 h 0 min to the job's time limit, 35 min 0 s after the last step" in late


def test_waits_of_a_gpu_are_no_exposed_communication() -> None:
    steps = [step_row(step) for step in range(STEPS - 9, STEPS + 1)]
    known = waits_text([rank_row(0), rank_row(1)], steps)
    assert known == "exposed communication 25 % (sums 15 %, stages 10 %), hidden 8 %, others 2 %"
    assert waits_text([rank_row(0, wait_device_s=0.4)], steps) == "GPU 40 %, others 2 % of a step"
    assert waits_text([rank_row(0)], []) == ""


def test_bytes_of_an_axis_stand_with_their_parts() -> None:
    sent = {"dp": 3 << 20, "pp": 0, "tp": 512, "dp_intra_node": 0, "dp_inter_node": 1 << 20}
    assert sent_words(sent) == "dp 3.0 MiB (inter node 1.0 MiB), tp 512 B"
    assert sent_words({"dp": 0}) == ""


def test_the_slowest_ranks_stand_with_their_excess_over_their_peers() -> None:
    rows = [rank_row(rank, excess, stages=1) for rank, excess in enumerate((0.0, 0.34, 0.0, 0.1, -0.1))]
    assert slowest_text(rows) == "rank 1 gpu1:cpu1 +34 %  rank 3 gpu1:cpu3 +10 %"
    assert slowest_text(rows[:1]) == ""


HOSTILE = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\x1b\x07\t\n\r\u202e日本é\u0301█…"), max_size=60
)  # fmt: skip


@pytest.fixture(scope="module")
def figures(folder: Path) -> WatchedFigures:
    return figures_of(folder)


@settings(max_examples=60)
@given(
    width=st.integers(1, 200), height=st.integers(1, 60), ascii_only=st.booleans(), name=HOSTILE, reason=HOSTILE,
    ranks=st.integers(0, 300), stages=st.integers(1, 40),
    state=st.sampled_from(["running", "queued", "failed", "recovering"]),
)  # fmt: skip
def test_no_line_is_wider_and_no_view_higher_than_the_terminal(
    figures: WatchedFigures, width: int, height: int, ascii_only: bool, name: str, reason: str, ranks: int, stages: int,
    state: Any,
) -> None:  # fmt: skip
    figures.live.ranks = [rank_row(rank, 0.1 * (rank % 3), stages) for rank in range(ranks)]
    figures.live.events[-1] = event("failed", reason=reason)
    status = replace(figures.status, name=name, reason=reason, state=state, warning=reason, last_end=reason)
    screen = Screen(width, height, ascii_only)
    lines = drawn(replace(figures, status=status), screen)
    runs = sweep_view(name, [(figures.live, status)] * 3, screen)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
    assert len(runs) <= height
    assert max(cell_len(line.plain) for line in runs) <= width
    if ascii_only:
        assert "".join(lines).isascii()


def test_a_sweep_has_a_line_for_each_run_and_those_at_work_remain_where_there_is_little_room(folder: Path) -> None:
    live = figures_of(folder).live
    states = ["done", "running", "queued"]
    runs = [(live, replace(STATUS, state=state, step=step)) for step, state in enumerate(states)]  # type: ignore[arg-type]
    lines = [line.plain for line in sweep_view("sizes", runs, Screen(100, 24))]
    assert lines[0] == "sizes  1 queued  1 running  1 done"
    assert [state in line for line, state in zip(lines[1:], states, strict=True)] == [True] * 3
    assert "running" in sweep_view("sizes", runs, Screen(100, 2))[1].plain


def test_a_curve_of_any_length_keeps_its_shape_and_repeated_steps_count_once() -> None:
    curve = BinnedCurve()
    for step in [*range(1, 20_001), *range(15_001, 20_001)]:
        curve.add(step, 1.0 if step <= 10_000 else 3.0)
    curve.add(20_001, math.nan)
    columns = curve.columns(10)
    assert columns[0] == 1.0
    assert columns[-1] == 3.0
    assert len(columns) == 10
    assert len(curve.columns(10**6)) <= BINS_MAX + 1
    assert sparkline(columns) == "▁▁▁▁▁█████"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert BinnedCurve().columns(10) == []


def test_the_curve_of_a_long_run_begins_with_sampled_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path)
    monkeypatch.setattr("hpctrain.report.live_run.METRICS_BYTES", 20_000)
    live = LiveRun(run)
    read = live.read()
    assert 10 < sum(isinstance(item, MetricRow) for item in read) < STEPS / 2
    losses = live.loss.columns(20)
    assert losses[0] == pytest.approx(step_row(1).loss, rel=0.1)
    assert losses == sorted(losses, reverse=True)
    assert METRICS_BYTES > 20_000
    assert len(LiveRun(run, all_rows=True).read()) > STEPS


def test_sampled_lines_are_whole_and_come_from_before_the_end(tmp_path: Path) -> None:
    with owner_only():
        path = tmp_path / "lines.jsonl"
        path.write_text("".join(f'{{"n": {n}}}\n' for n in range(1000)) + "no json\n")
    numbers = [value["n"] for value in sampled_values(path, 50, 2000)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert 40 <= len(numbers) <= 50
    assert numbers[-1] < 900
    assert sampled_values(path, 50, 1 << 20) == []
    assert sampled_values(tmp_path / "none", 50, 0) == []


def test_a_look_adds_what_is_new_and_nothing_twice(folder: Path) -> None:
    live = LiveRun(folder)
    assert live.read()
    total_j = live.energy.total_j
    assert live.read() == []
    assert live.energy.total_j == total_j == pytest.approx(2 * STEPS / 10 * 3900)
    assert len(live.ranks) == 8


def test_times_of_the_day_say_their_zone() -> None:
    assert PlainView().lines(STATUS, [BEGIN], 0.0)[0].startswith("11:06:40Z  attempt")


def test_a_waiting_run_shows_when_it_may_start(folder: Path) -> None:
    waiting = RunStatus("queued", "job 7: x (Priority)", "gpt", 0, 0, 0, 90, [], 0, 0, expected_start_s=7200.0)
    shown = "\n".join(drawn(figures_of(folder, status=waiting, now=0.0), Screen(100, 24)))
    assert "Slurm expects to start it in 2 h 0 min (1970-01-01T02:00:00Z)" in shown
    assert "loss" not in shown


def test_nodes_of_the_newest_attempt() -> None:
    first = [BEGIN, event("generation_started", 0, members=["n1", "n2", "n3"]), event("node_lost", 0, node="n2")]
    assert node_states(first) == {"n1": "takes part", "n2": "lost", "n3": "takes part"}
    assert node_states([*first, event("node_returned", 0, node="n2")])["n2"] == "back"
    again = event("attempt_started", -1, nodes=["n4"])
    assert node_states([*first, again]) == {"n4": "starts"}


def test_the_end_of_the_attempt_before_is_said_unless_the_reason_has_it(folder: Path) -> None:
    ended = "attempt 0 ended (infrastructure): Slurm ended the job: NODE_FAIL"
    figures = figures_of(folder, status=replace(STATUS, last_end=ended))
    assert ended in "\n".join(drawn(figures, Screen(100, 24)))
    known = replace(STATUS, last_end=ended, reason="Slurm ended the job: NODE_FAIL")
    assert "attempt 0 ended" not in "\n".join(drawn(replace(figures, status=known), Screen(100, 24)))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch, owner_only():
        made = made_run(Path(scratch))
        GOLDEN.mkdir(exist_ok=True)
        for title, terminal in SCREENS.items():
            text = "\n".join(line.rstrip() for line in drawn(figures_of(made), terminal))
            (GOLDEN / f"{title}.txt").write_text(text + "\n")
