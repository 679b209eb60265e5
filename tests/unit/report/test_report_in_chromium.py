"""Pages with charts in a real browser: nothing fails, nothing is asked from anywhere, every figure is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import Chromium
from click.testing import CliRunner
from long_run import write_long_run

from hpctrain.base.atomic import write_json
from hpctrain.cli.main import cli
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.rank_log import PeerTraffic, RankRow
from hpctrain.records.history.step_spans import RankSpans, StepSpans, spans_file

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.slow]
WIDTHS = (390, 800, 1400)
DRAWN = """[...document.querySelectorAll('.chart')].map(place => {
  const canvas = place.querySelector('canvas');
  if (!canvas) return [place.id, place.querySelectorAll('svg path[stroke], svg path[fill], svg rect[fill]').length];
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return [place.id, new Set(new Uint32Array(pixels.buffer)).size];
})"""
LABELLED = "[...document.querySelectorAll('.chart')].every(place => place.getAttribute('aria-label').length > 20)"
TOO_WIDE = "document.documentElement.scrollWidth > window.innerWidth"
NARROWEST_CELL = """Math.min(...[...document.querySelectorAll('td')].filter(cell => cell.offsetParent && /\\s/.test(
  cell.textContent.trim()) && cell.textContent.trim().length > 30).map(cell => cell.clientWidth))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def full_run(make, finished_run):
    """A run with every part that a report can show."""
    folder = finished_run.path
    rows = [
        RankRow(
            step=step, steps=10, generation=0, rank=rank, device=f"local{rank}:cpu0", stages=[rank // 2],
            forward_s=[0.1], backward_s=[0.2 + 0.01 * rank], wait_pp_s=0.01, wait_dp_s=0.02, wait_world_s=0.01,
            wait_device_s=0.0, hidden_dp_s=0.0, memory_bytes=4e8,
            layers=[LayerFigures(layer=str(rank), numbers=100, gradient_density=0.1 * (rank + 1), energy_kept=0.5)],
            traffic=[PeerTraffic(address="10.0.0.2", sent_bytes=2**20, busy_s=0.5)],
        )
        for step in (10, 20, 30) for rank in range(4)
    ]  # fmt: skip
    (folder / "metrics-ranks.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    spans = [
        RankSpans(rank=rank, device=f"local{rank}:cpu0", spans=[
            ("forward stage 0 mb 0", -0.5, -0.3, "compute"), ("backward stage 0 mb 0", -0.3, -0.1, "compute"),
            ("reduce dp", -0.1, -0.02, "dp"),
        ])
        for rank in range(4)
    ]  # fmt: skip
    (folder / "profile").mkdir()
    StepSpans(step=10, generation=0, ranks=spans).write(spans_file(folder, 10))
    attempt = {"attempt": 0, "nodes": [f"local{n}" for n in range(4)], "start": make.start_s, "end": make.start_s + 40}
    (folder / "attempts.jsonl").write_text(
        json.dumps({**attempt, "class": "done", "reason": "all steps are done"}) + "\n"
    )
    return folder


def check(browser, page: Path, figures: int, width: int, dark: bool = False) -> None:
    browser.open(page, width, dark)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    drawn = dict(browser.value(DRAWN))
    assert len(drawn) == figures
    assert {name: count for name, count in drawn.items() if count < 3} == {}
    assert browser.value(LABELLED)
    assert not browser.value(TOO_WIDE)


def report(*words: object) -> None:
    done = CliRunner().invoke(cli, ["report", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr


def test_the_report_of_a_run_at_three_widths_light_and_dark(full_run, browser, tmp_path):
    page = tmp_path / "report.html"
    report(full_run, "-o", page)
    for width in WIDTHS:
        check(browser, page, 16, width)
    check(browser, page, 16, 1400, dark=True)
    # No table is broken to a word a line.
    browser.open(page, 390)
    assert browser.value(NARROWEST_CELL) > 100
    text = browser.value("document.body.innerText").split()
    assert "local0 10.0.0.2 2.0 MiB 2.1 MB/s" in " ".join(text)
    # The figures over steps can be read over time, by keyboard and as tables.
    assert browser.value("document.querySelectorAll('#chart-loss select, .over select').length") == 2
    browser.value(
        "(s => { s.value = 2; s.dispatchEvent(new Event('change')); })(document.querySelector('.over select'))"
    )
    assert "seconds since the start" in browser.value("document.getElementById('chart-loss').textContent")
    key = "document.getElementById('chart-loss').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))"
    browser.value(key)
    assert "training" in browser.value("document.querySelector('#chart-loss > div:last-child').textContent")
    browser.value("document.querySelector('figure details').open = true")
    browser.value("new Promise(done => setTimeout(done))")
    assert browser.value("document.querySelectorAll('figure details table tr').length") == 1 + 5 + 40 + 2
    assert browser.errors == []


def test_print_is_light_and_fits(full_run, browser, tmp_path):
    page = tmp_path / "report.html"
    report(full_run, "-o", page)
    browser.open(page, 1400, dark=True)
    browser.value("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.value("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#ffffff"
    assert browser.value("Math.max(...[...document.querySelectorAll('.chart svg')].map(svg => svg.clientWidth))") <= 660
    browser.value("window.dispatchEvent(new Event('afterprint'))")
    assert browser.value("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") != "#ffffff"
    assert browser.errors == []


def test_the_report_of_several_runs(make, full_run, browser, tmp_path):
    rows = make.history()[1]
    folders = [full_run]
    for number, changed in enumerate(({"seed": 1}, {"seed": 2}, {"optimizer": {"lr": 0.01}}), 1):
        folder = tmp_path / "runs" / f"fable-2026010{number + 2}T030405Z-00ff"
        folder.mkdir(mode=0o700)
        write_json(folder / "run.yaml", {**make.run, **changed})
        lines = [row.model_copy(update={"loss": row.loss + 0.1 * number}) for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in lines))
        folders.append(folder)
    page = tmp_path / "several.html"
    report(*folders, "--baseline", folders[3], "-o", page)
    for width in WIDTHS:
        check(browser, page, 7, width)
    text = browser.value("document.body.innerText")
    assert "Change against fable-20260105" in text
    assert "3 seeds (0, 1, 2)" in text
    assert "3 seeds (0, 1, 2) as" in browser.value("document.getElementById('chart-loss').textContent")


def test_a_long_run_on_many_nodes(browser, tmp_path):
    """Points are reduced by a stated rule, matrices to blocks, tables to their first rows."""
    folder, page = tmp_path / "long", tmp_path / "report.html"
    write_long_run(folder, steps=4000, nodes=160, fault_every=1000)
    report(folder, "-o", page)
    check(browser, page, 16, 1400)
    text = browser.value("document.body.innerText")
    assert "of 4,000 points shown" in text
    assert "48 of 1,280 devices shown" in text
    assert "cluster.time: " in text
    assert "--exclude n0007" in text
    assert page.stat().st_size < 3e6


def test_a_page_of_simulate(browser, make, finished_run, tmp_path):
    from hpctrain.report.html.charts.spans import gantt_chart
    from hpctrain.report.html.page import write_charts
    from hpctrain.report.timeline import Bar

    page = tmp_path / "step.html"
    bars = [Bar(row, "FB"[number % 2], f"{number}", number, number + 1.0) for row in (0, 1) for number in range(2000)]
    write_charts(page, "A step", ["One sentence."], [gantt_chart("step", "A step", bars, 2)], "Predicted.")
    check(browser, page, 1, 800)
