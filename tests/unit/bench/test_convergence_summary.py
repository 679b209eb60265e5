"""What trainings with several seeds say: gaps, bands, equal time. All of it is arithmetic on rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import InputError
from hpctrain.bench.compression.convergence import (
    SEARCH_SEED,
    SEARCH_SPEC,
    TEXTS,
    ConvergenceSettings,
    TrainingCase,
    best_learning_rates,
    compare,
    text_hash,
    train_cases,
)
from hpctrain.bench.compression.convergence_summary import (
    Summary,
    band,
    loss_at,
    step_seconds,
    steps_to,
    summarise,
    write_page,
)
from hpctrain.bench.compression.step_times import make_text
from hpctrain.bench.ranks import run_ranks
from hpctrain.bench.record import RowStore
from hpctrain.corpus.input.sample_text import SampleText, TextLocation, find_sample_text
from hpctrain.records.model.decoder_spec import DecoderSpec

MBIT = 1e6


def row(method: str, seed: int, *losses: float, cpu_s: float = 0.1, sent: float | None = 1e6) -> dict[str, Any]:
    """A training validated every 10 steps; the last loss is that of its last step."""
    curve = [[10 * (number + 1), loss] for number, loss in enumerate(losses)]
    found: dict[str, Any] = {"method": method, "seed": seed, "curve": curve, "loss": losses[-1], "cpu_s": cpu_s}
    return found if sent is None else found | {"sent_bytes": sent, "late_sent_bytes": sent / 2}


def diverged(method: str, seed: int, *losses: float) -> dict[str, Any]:
    found = row(method, seed, *losses)
    del found["loss"]
    return found | {"diverged_step": 10 * len(losses) + 10}


def by_method(rows: list[dict[str, Any]], *rates: float) -> dict[str, Summary]:
    return {summary.method: summary for summary in summarise(rows, "dense", rates)}


def test_the_gap_is_between_trainings_of_the_same_seed() -> None:
    # The seeds differ by far more than the methods do.
    rows = [row("dense", 1, 4.0), row("dense", 2, 2.0), row("topk", 1, 4.04), row("topk", 2, 2.04)]
    found = by_method(rows)["topk"].gap_pct
    assert found is not None
    assert found.mean == pytest.approx(1.5)
    assert found.half_width == pytest.approx(12.706 * 0.5, rel=1e-3), "Student's t of one degree of freedom"


def test_a_single_seed_has_no_band_and_no_values_have_none() -> None:
    assert band([3.0]) is not None
    assert band([3.0]).half_width is None  # type: ignore[union-attr]
    assert band([]) is None


def test_a_training_that_diverged_is_counted_and_has_no_gap() -> None:
    found = by_method([row("dense", 1, 3.0), row("dense", 2, 3.0), row("x", 1, 3.3), diverged("x", 2, 3.1)])["x"]
    assert found.diverged == 1
    assert found.gap_pct is not None
    assert (found.gap_pct.seeds, found.gap_pct.mean) == (1, pytest.approx(10.0))


def test_at_equal_time_a_smaller_message_is_further_on() -> None:
    # 1 MB at 80 Mbit/s is 0.1 s; with 0.1 s of processor a step of dense takes 0.2 s, one of the other 0.1 s.
    rows = [row("dense", 1, 5.0, 4.0, 3.0, 2.0), row("topk", 1, 5.2, 4.2, 3.2, 2.2, sent=0.0)]
    found = by_method(rows, 80 * MBIT)
    at = found["topk"].at_rate[80 * MBIT]
    assert at.step_s == pytest.approx(0.1)
    assert at.gap_pct is not None
    # After 4 s topk has made its 40 steps and dense 20.
    assert at.gap_pct.mean == pytest.approx(100 * (2.2 / 4.0 - 1))
    assert at.target_s is None, "it never comes within 1 % of 2.0"
    assert found["dense"].at_rate[80 * MBIT].target_s == pytest.approx((40 - 0.2) * 0.2)


def test_uncounted_bytes_have_no_time() -> None:
    found = by_method([row("dense", 1, 3.0), row("hook", 1, 3.0, sent=None)], MBIT)["hook"]
    assert found.at_rate == {}
    assert found.sent_bytes is found.late_sent_bytes is None
    assert by_method([row("dense", 1, 3.0, sent=4e6)])["dense"].late_sent_bytes == 2e6
    assert step_seconds(row("hook", 1, 3.0, sent=None), MBIT) is None


def test_between_two_validations_the_loss_lies_on_the_line() -> None:
    training = row("x", 1, 5.0, 4.0, 3.0)
    assert loss_at(training, 15) == pytest.approx(4.5)
    assert loss_at(training, 31) is None
    assert loss_at(training, 9) is None
    assert steps_to(training, 3.5) == pytest.approx(25)
    assert steps_to(training, 5.5) == 10
    assert steps_to(training, 2.9) is None


def test_without_the_reference_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no row of dense"):
        summarise([row("x", 1, 3.0)], "dense", [])


def test_the_page_holds_every_curve_and_a_band_where_there_are_seeds(tmp_path: Path) -> None:
    rows = [row("dense", 1, 3.0, 2.0), row("dense", 2, 3.2, 2.1), row("hook", 1, 3.0, 2.5, sent=None)]
    write_page(tmp_path / "page.html", rows, [MBIT])
    page = (tmp_path / "page.html").read_text()
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)]
    names = [[(curve["name"], "low" in curve) for curve in chart["curves"]] for chart in charts]
    assert names == [[("dense", True), ("hook", False)], [("dense", True)]], "uncounted bytes have no time axis"
    assert charts[1]["curves"][0]["x"][0] == pytest.approx([10 * 8.1, 20 * 8.1])


def test_rows_outlive_the_bench_and_other_settings_are_refused(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "new" / "rows.jsonl", {"steps": 4, "sizes": (1, 2)})
    store.add({"method": "dense", "seed": 1})
    path = tmp_path / "new" / "rows.jsonl"
    with path.open("a") as file:
        file.write('{"method": "topk", "se')  # killed while it wrote
    path.parent.chmod(0o2775)  # in a project's folder: rows are figures, and nothing runs by them
    again = RowStore(path, {"steps": 4, "sizes": (1, 2)})
    assert again.find(method="dense", seed=1) is not None
    assert again.find(method="topk") is None
    again.add({"method": "topk", "seed": 1})
    assert RowStore(path, {"steps": 4, "sizes": (1, 2)}).find(method="topk", seed=1) is not None
    with pytest.raises(InputError, match=r"steps = 4, now asked for is 5"):
        RowStore(path, {"steps": 5, "sizes": (1, 2)})


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    settings = ConvergenceSettings(steps=200, warmup_share=0.1)
    rates = [settings.learning_rate(step, 1.0) for step in range(201)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[19] == pytest.approx(1.0)
    assert rates[200] == pytest.approx(0.1)
    assert rates[20:] == sorted(rates[20:], reverse=True)


TINY = ConvergenceSettings(
    workers=1, steps=11, rows=1, seq_len=16, spec=DecoderSpec(layers=1, dim=16, heads=2, vocab=320)
)


def case(method: str, seed: int, learning_rate: float = 2e-3, **changes: Any) -> TrainingCase:
    return TrainingCase(method, seed, "mixed", learning_rate, TINY.spec)._replace(**changes)


@pytest.mark.slow
def test_a_row_for_each_training_as_soon_as_it_is_done(tmp_path: Path) -> None:
    make_text(tmp_path / "mixed", 20_000)
    path = tmp_path / "rows.jsonl"
    cases = [case("dense", 1), case("ddp_fp32", 1), case("dense", 2), case("dense", 1, 1e-2), case("auto_1gbit", 1)]
    train_cases(0, 1, cases, TINY, tmp_path, path, {"mixed": "abc"})
    rows = RowStore(path, TINY.shared()).rows
    assert [{key: row[key] for key in case.key()} for case, row in zip(cases, rows, strict=True)] == [
        case.key() for case in cases
    ]
    for row in rows:
        assert [step for step, _ in row["curve"]] == [10, 11]
        assert row["loss"] == row["curve"][-1][1] > 0
        assert row["cpu_s"] > 0
        assert row["text_sha256"] == "abc"
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-5), "one worker's gradient is the sum"
    assert rows[0]["loss"] != rows[2]["loss"], "another seed is another training"
    assert rows[0]["loss"] != rows[3]["loss"], "so is another learning rate"
    assert [row.get("choice") for row in rows] == [None] * 4 + ["none"], "for one replica the planner chooses no codec"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_launch_trains_several_sharded_methods(tmp_path: Path) -> None:
    make_text(tmp_path / "mixed", 20_000)
    settings = replace(TINY, workers=2, steps=1)
    cases = [case("fsdp2_dense", 1), case("fsdp2_dense", 1)]
    run_ranks(train_cases, 2, cases, settings, tmp_path, tmp_path / "rows.jsonl", {"mixed": "abc"})
    first, second = RowStore(tmp_path / "rows.jsonl", settings.shared()).rows
    assert first["curve"] == second["curve"]


def stored(path: Path, *cases: tuple[TrainingCase, float]) -> RowStore:
    """A file with a row for each training and its last loss."""
    store = RowStore(path, TINY.shared())
    for training, loss in cases:
        of_text = {"text_sha256": text_hash(training.text, TINY.text_bytes)}
        store.add(row(training.method, training.seed, loss) | training.key() | of_text)
    return store


def test_what_is_in_the_file_is_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    store = stored(path, (case("dense", 1), 1.25), (case("bf16", 1), 1.25))
    told: list[str] = []
    assert compare(["bf16"], [1], TINY, path, told.append).rows == store.rows
    assert told == [], "nothing was missing, so nothing was started"


@pytest.mark.parametrize("spec", [TINY.spec, SEARCH_SPEC], ids=["another model", "the model of the search"])
def test_methods_are_compared_at_the_best_rates_of_small_trainings_on_every_text(
    tmp_path: Path, spec: DecoderSpec
) -> None:
    """The trainings that found the rates are none of those that are compared, whichever model is trained."""
    path = tmp_path / "rows.jsonl"
    search = {("dense", 1e-3): 3.0, ("dense", 2e-3): 2.0, ("topk_7", 1e-3): 2.5, ("topk_7", 2e-3): 2.6}
    compared = [
        case(method, 1, rate, text=text, spec=spec)
        for text in ("mixed", "code")
        for method, rate in (("dense", 2e-3), ("topk_7", 1e-3))
    ]
    stored(
        path,
        *((case(method, SEARCH_SEED, rate, spec=SEARCH_SPEC), loss) for (method, rate), loss in search.items()),
        *zip(compared, (2.0, 2.2, 1.0, 1.05), strict=True),
        (case("topk_7", 1, 2e-3, spec=spec), 9.0),  # at another rate than its best
    )
    settings = replace(TINY, learning_rates=(1e-3, 2e-3), texts=("mixed", "code"), spec=spec)
    done = compare(["topk_7"], [1], settings, path, pytest.fail)
    assert done.learning_rates == {"dense": 2e-3, "topk_7": 1e-3}
    assert [row["loss"] for row in done.searched] == list(search.values())
    assert [row["loss"] for row in done.rows] == [2.0, 2.2, 1.0, 1.05]
    both = by_method(done.rows)["topk_7"].gap_pct
    assert both is not None
    assert (both.seeds, both.mean) == (2, pytest.approx((10 + 5) / 2)), "each beside exact sums on its own text"


def test_a_training_that_diverged_is_no_best_one() -> None:
    rows = [row("x", 0, 3.0) | {"learning_rate": 1e-3}, diverged("x", 0, 1.0) | {"learning_rate": 2e-3}]
    assert best_learning_rates(rows) == {"x": 1e-3}
    assert best_learning_rates([rows[1], rows[1] | {"learning_rate": 4e-3}]) == {"x": 2e-3}


def test_losses_on_another_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "rows.jsonl", (case("dense", 1), 1.25))
    one = tmp_path / "one.txt"
    one.write_text("some words")
    monkeypatch.setattr(
        "hpctrain.bench.compression.convergence.find_sample_text", lambda *_: SampleText((one,), 10, "one file")
    )
    with pytest.raises(InputError, match=r"rows\.jsonl: text_sha256 of its rows of .* mixed is .* give -o another"):
        compare(["dense"], [1], TINY, tmp_path / "rows.jsonl", print)


def test_equal_texts_have_equal_hashes_wherever_their_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    for folder, word in (("here", "word "), ("elsewhere", "word "), ("changed", "term ")):
        place = TextLocation("files", tmp_path / folder, re.compile(r".*\.txt"))
        place.folder.mkdir()
        (place.folder / "a.txt").write_text(100 * word)
        monkeypatch.setitem(TEXTS, "code", lambda place=place: (place,))
        hashes.append(text_hash("code", 1000))
    assert hashes[0] == hashes[1] != hashes[2], "the changed file has as many bytes as before"


def test_the_text_code_has_no_files_of_packages_and_is_as_large_as_trainings_take() -> None:
    text = find_sample_text(ConvergenceSettings.text_bytes, TEXTS["code"]())
    assert text.text_bytes >= ConvergenceSettings.text_bytes
    assert not any("site-packages" in path.parts or "dist-packages" in path.parts for path in text.files)
