"""report.html: what it shows, what it does with missing parts, and that it needs nothing from outside."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from hpctrain.base.atomic import write_json
from hpctrain.base.errors import FileError, HpctrainError, RefusedError
from hpctrain.cli.main import cli
from hpctrain.records.history.provenance import (
    ImageIdentity,
    InstalledPackage,
    NodeEnvironment,
    RunProvenance,
    SoftwareVersions,
)
from hpctrain.records.history.run_log import BytesSent
from hpctrain.records.history.step_spans import RankSpans, StepSpans, spans_file
from hpctrain.report.html.charts.matrices import QUANTITIES, matrix
from hpctrain.report.html.page import chart_library
from hpctrain.report.html.render import render, write_report
from hpctrain.report.html.run_view import read_run_view
from hpctrain.report.step_trace import PredictedSpan


class Page(HTMLParser):
    """The text and the chart data of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.charts, self.links = [], [], {}, []
        self._data = self._skip = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self._skip = tag in ("script", "style")
        self._data = given.get("id") if given.get("type") == "application/json" else None
        self.links += [given[key] for key in ("src", "href") if key in given]

    def handle_endtag(self, tag):
        self._data = self._skip = None

    def handle_data(self, data):
        if self._data:
            self.charts[self._data.removeprefix("chart-").removesuffix("-data")] = json.loads(data)
        elif not self._skip:
            self.texts.append(" ".join(data.split()))

    @property
    def text(self):
        return " ".join(text for text in self.texts if text)


def page_of(make, folder, at=100.0):
    return Page(render(read_run_view(folder.path, make.start_s + at)))


def test_the_whole_run(make, finished_run):
    page = page_of(make, finished_run)
    assert list(page.charts) == [
        "loss", "throughput", "step-time", "lr", "grad-norm", "memory", "stages", "bubble", "bytes", "wall",
        "bandwidth", "loaded-bandwidth", "latency",
    ]  # fmt: skip
    for expected in (
        "fable", "done", "40 of 40", "Lost steps 5", "slowest 6.2 s",
        "worker of local2 (rank 2) was killed (SIGKILL)", "training goes on with step 21",
        "pp 2 × dp 2 × tp 1 on 4 nodes, schedule 1f1b", "blocks 0 to 2",
        "compression embedding_head none, attention int4, feed_forward none",
        "500 ms (14 % above the prediction)", "400.5 MiB (5 % above the prediction)", "bound of the same model 380 ms",
        "pp 4, dp 1 +120 ms", "cannot run", "degraded: fp32 18 GFLOP/s", "these links are memory, not a network",
        '"preset": "tiny-1m"',
    ):  # fmt: skip
        assert expected in page.text, expected


def test_steps_that_were_done_again_are_a_curve_of_their_own_with_marks_at_recoveries(make, finished_run):
    chart = page_of(make, finished_run).charts["loss"]
    curves = {curve["name"]: curve for curve in chart["curves"]}
    assert list(curves) == ["done again", "training", "validation"]
    steps, tokens, seconds = ([axis["title"] for axis in chart["x"]].index(name) for name in (
        "step", "tokens", "seconds since the start",
    ))  # fmt: skip
    assert curves["done again"]["x"][steps] == list(range(21, 26))
    assert curves["training"]["x"][steps] == list(range(1, 41))
    assert curves["training"]["x"][tokens][-1] == 40 * 16 * 128
    assert curves["training"]["x"][seconds][-1] == pytest.approx(29.2 + 0.5 * 19)
    assert curves["validation"]["x"][steps] == [20, 40]
    assert len({curve["colour"] for curve in chart["curves"]}) == 3
    assert chart["marks"] == [{"x": [21, 21 * 16 * 128, 29.2], "kind": "recovery"}]


def test_only_axes_that_sent_something_are_drawn(make, finished_run):
    assert [curve["name"] for curve in page_of(make, finished_run).charts["bytes"]["curves"]] == [
        "data parallel",
        "pipeline",
    ]


def test_gradients_that_are_summed_by_level_have_bytes_by_level(make, run_folder):
    sent = BytesSent(dp=300, dp_intra_node=200, dp_inter_node=100)
    run_folder.write([], [make.row(step, step, bytes_sent=sent) for step in (1, 2)])
    curves = page_of(make, run_folder).charts["bytes"]["curves"]
    assert {curve["name"]: curve["y"] for curve in curves} == {
        "data parallel": [300, 300],
        "data parallel, within nodes": [200, 200],
        "data parallel, between nodes": [100, 100],
    }


def test_a_bubble_is_drawn_only_for_steps_that_had_a_pipeline(make, run_folder):
    rows = [make.row(step, step, bubble_fraction=None) for step in (1, 2)]
    run_folder.write([], rows)
    assert "bubble" not in page_of(make, run_folder).charts
    run_folder.write([], [*rows, make.row(3, 3, bubble_fraction=0.25)])
    assert page_of(make, run_folder).charts["bubble"]["curves"][0]["y"] == [None, None, 0.25]


def test_an_untouched_run_says_what_is_absent(make, run_folder):
    page = page_of(make, run_folder)
    assert not page.charts
    for expected in (
        "No step is done yet.", "There is no plan yet.", "There is no topology yet.", "No event was written yet.",
    ):  # fmt: skip
        assert expected in page.text


def test_a_run_in_progress_has_a_report(make, run_folder):
    events, rows = make.history()
    run_folder.write(events[:5], rows[:25])
    page = page_of(make, run_folder)
    assert "not yet" in page.text
    assert "There is no topology yet." in page.text
    assert page.charts["loss"]["curves"][0]["x"][0] == list(range(1, 26))


def test_a_damaged_file_is_named_and_the_rest_is_shown(make, finished_run):
    (finished_run.path / "topology.json").write_text("{")
    page = page_of(make, finished_run)
    assert "What could not be read" in page.text
    assert "topology.json:1: not valid JSON" in page.text
    assert "loss" in page.charts


def test_without_a_run_file_there_is_no_report(make, run_folder):
    (run_folder.path / "run.yaml").unlink()
    with pytest.raises(FileError, match=r"run\.yaml: no such file"):
        read_run_view(run_folder.path, make.start_s)


EVIL = "</script><script>alert(1)</script><b onload=x>"


def with_evil_names(topology):
    names = {node.id: f"{EVIL}{index}" for index, node in enumerate(topology.nodes)}
    nodes = [node.model_copy(update={"id": names[node.id]}) for node in topology.nodes]
    links = [link.model_copy(update={"a": names[link.a], "b": names[link.b]}) for link in topology.fabric.links]
    fabric = topology.fabric.model_copy(update={"links": links})
    return topology.model_copy(update={"nodes": nodes, "fabric": fabric})


def test_text_from_files_stays_text(make, run_folder):
    write_json(run_folder.path / "run.yaml", {**make.run, "data": {"train": [EVIL]}})
    run_folder.write([make.event("failed", 5, 0, EVIL)], [make.row(1, 1)])
    make.plan().model_copy(update={"notes": [EVIL]}).write(run_folder.path / "plan.json")
    view = read_run_view(run_folder.path, make.start_s + 9)
    # A reader refuses such names of nodes; the page does not rely on that.
    object.__setattr__(view, "topology", with_evil_names(make.topology(3)))
    text = render(view)
    assert "<script>alert" not in text
    assert "<b onload" not in text
    page = Page(text)
    assert "b" not in page.tags
    assert page.charts["latency"]["columns"][0] == f"{EVIL}0"


def test_a_diverged_loss_is_a_gap(make, run_folder):
    losses = {2: float("nan"), 3: float("inf")}  # a reader refuses such rows; the page does not rely on that
    rows = [make.row(1, 1), *(make.row(n, n).model_copy(update={"loss": loss}) for n, loss in losses.items())]
    view = read_run_view(run_folder.path, make.start_s)
    object.__setattr__(view, "rows", rows)
    object.__setattr__(view, "history", rows)
    chart = Page(render(view)).charts["loss"]
    assert chart["curves"][0]["y"][1:] == [None, None]


def test_the_file_needs_no_network(make, finished_run):
    target = finished_run.path / "report.html"
    write_report(finished_run.path, target, make.start_s + 50)
    text = target.read_text()
    assert chart_library() in text
    assert "default-src 'none'" in text
    links = [link for link in Page(text).links if not link.startswith("#")]
    assert links == []
    assert len(text.encode()) < 1.5e6


def test_the_command_writes_where_it_is_told(finished_run, tmp_path):
    target = tmp_path / "mine.html"
    result = CliRunner().invoke(cli, ["report", str(finished_run.path), "-o", str(target)], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, f"{target}\n")
    assert "<title>fable – hpctrain report</title>" in target.read_text()
    assert not (finished_run.path / "report.html").exists()


def test_a_matrix_has_both_directions_and_gaps(make):
    _, cells = matrix(make.topology(3), QUANTITIES[0])
    assert cells[0][1] == 1.0e9
    assert cells[1][0] == pytest.approx(1.25e9)
    assert cells[1][2] is None  # nobody measured this pair
    assert [cells[index][index] for index in range(3)] == [None] * 3


def test_a_plan_is_known_by_the_file_that_it_was_copied_from(make, run_folder):
    copies = ["generations/plan-000000.77.json", "generations/plan-000002.78.json"]
    events = [
        make.event("planned", 0, 0, plan="plan.json"),
        make.event("generation_started", 1, 0, plan=copies[0]),
        make.event("generation_started", 2, 1, "a worker was killed", plan=copies[0]),
        make.event("replanned", 3, 2, plan="plan-2.json"),
        make.event("generation_started", 4, 2, "a node is gone", plan=copies[1]),
    ]
    run_folder.write(events, [make.row(step, step, generation) for step, generation in ((1, 0), (2, 1), (3, 2))])
    for name in ("plan.json", "plan-2.json"):
        make.plan().write(run_folder.path / name)
    uses = read_run_view(run_folder.path, make.start_s).plans
    assert [(use.file, use.generations) for use in uses] == [("plan.json", [0, 1]), ("plan-2.json", [2])]
    assert [[row.step for row in use.rows] for use in uses] == [[1, 2], [3]]


def test_a_plan_given_by_hand_is_known_without_a_planning_event(make, finished_run):
    uses = read_run_view(finished_run.path, make.start_s).plans
    assert [(use.file, use.generations) for use in uses] == [("plan.json", [0]), ("plan-1.json", [1])]


def test_software_has_a_column_for_each_attempt(make, finished_run):
    software = SoftwareVersions(hpctrain="0.1.0", hpctrain_commit="ab12", python="3.11.7", torch="2.7.1")
    newer = software.model_copy(update={"torch": "2.8.0"})
    lines = [
        NodeEnvironment(attempt=attempt, node=f"n{number}", time_s=1.0, software=versions, driver="535.1")
        for attempt, number, versions in ((0, 1, software), (0, 2, software), (1, 1, software), (1, 2, newer))
    ]
    text = "".join(json.dumps(line.to_json()) + "\n" for line in lines)
    (finished_run.path / "environments.jsonl").write_text(text)
    image = ImageIdentity(path="/images/train.sif", id="0a-1b")
    packages = [InstalledPackage(name="torch", version="2.7.1")]
    provenance = RunProvenance(created="2026-11-20T22:00:00Z", software=software, image=image, packages=packages)
    provenance.write(finished_run.path / "provenance.json")
    page = page_of(make, finished_run).text
    for expected in (
        "submitted 2026-11-20T22:00:00Z", "hpctrain 0.1.0 (ab12)", "image /images/train.sif (id 0a-1b)",
        "1, in requirements.lock", "attempt 0 attempt 1", "torch 2.7.1 2.7.1 on n1, 2.8.0 on n2", "driver 535.1 535.1",
    ):  # fmt: skip
        assert expected in page, expected
    (finished_run.path / "provenance.json").write_text("{")
    assert "provenance.json" in page_of(make, finished_run).text


def test_what_it_cost_and_what_to_set_next_time(make, finished_run):
    folder = finished_run.path
    attempts = [
        {"attempt": 0, "job_id": "7", "nodes": ["n1"], "start": make.start_s, "end": make.start_s + 20,
         "class": "resumable", "reason": "preempted"},
        {"attempt": 1, "job_id": "8", "nodes": ["n1"], "start": make.start_s + 25, "end": make.start_s + 40,
         "class": "done"},
    ]  # fmt: skip
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    page = page_of(make, finished_run)
    for expected in (
        "Done: 40 steps, 81.9k tokens in", "0.00972 node-hours", "of them in useful steps", "lost to faults",
        "0 7 1 – 20 s resumable – preempted", "1 8 1 5 s 15 s done", "20 +20.5 s 400 ms 12.0 MiB saved",
        "Next time 5 steps were done again after faults", "checkpoint.every: 25",
    ):  # fmt: skip
        assert expected in page.text, (expected, page.text)


def test_a_validation_loss_below_the_training_loss_is_explained(make, run_folder):
    rows = [make.row(step, step) for step in range(1, 21)]
    run_folder.write([], [*rows[:-1], rows[-1].model_copy(update={"valid_loss": 9.0})])
    assert "is below the training loss" not in page_of(make, run_folder).text
    run_folder.write([], [make.row(21, 21, valid_loss=1.0)])
    assert (
        "After step 21 the validation loss is below the training loss. That is no error"
        in page_of(make, run_folder).text
    )


def test_energy_is_a_table(make, finished_run):
    line = {"schema": "hpctrain.node_metric/v1", "time_s": make.start_s + 40, "seconds": 40.0, "attempt": 0,
            "node": "n1", "machine": "n1", "cpu_j": {"package-0": 3.6e6}}  # fmt: skip
    (finished_run.path / "metrics-nodes.jsonl").write_text(json.dumps(line) + "\n")
    assert "all attempts 1 kWh" in page_of(make, finished_run).text


def test_a_log_of_nodes_that_is_too_large_is_named(make, finished_run, monkeypatch):
    monkeypatch.setattr("hpctrain.report.html.run_view.NODE_LOG_BYTES", 3)
    (finished_run.path / "metrics-nodes.jsonl").write_text("{}\n\n")
    assert "4 B are too much for a report; `hpctrain status` sums the energy up" in page_of(make, finished_run).text


def test_the_predicted_step_stands_below_the_measured_one(make, finished_run):
    ranks = [RankSpans(rank=0, device="local0:cpu0", spans=[("forward stage 0 mb 0", -1.0, -0.5, "compute")])]
    (finished_run.path / "profile").mkdir()
    StepSpans(step=10, generation=0, ranks=ranks).write(spans_file(finished_run.path, 10))

    def predict(folder, generation):
        assert (folder, generation) == (finished_run.path, 0)
        return [PredictedSpan(0, "forward stage 0 mb 0", 0.0, 0.4, "compute")]

    target = finished_run.path / "report.html"
    write_report(finished_run.path, target, make.start_s, predict)
    chart = Page(target.read_text()).charts["timeline"]
    assert chart["rows"] == ["rank 0", "predicted"]
    assert [bar[:4] for bar in chart["bars"]] == [[0, 0, 0.0, 0.5], [1, 0, 0.0, 0.4]]

    for kind in (RefusedError, HpctrainError):

        def refuse(folder, generation, kind=kind):
            raise kind("no such plan")

        write_report(finished_run.path, target, make.start_s, refuse)
        assert "the predicted step is absent: no such plan" in Page(target.read_text()).text
