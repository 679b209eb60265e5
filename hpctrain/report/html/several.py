"""The report of several runs as an HTML page: what they cost, in which settings they differ, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.collector import collector_paused
from hpctrain.base.errors import FileError
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.ledger import ATTEMPTS_FILE
from hpctrain.records.history.run_log import MetricRow, last_row_of_each_step, read_events, read_metrics
from hpctrain.records.run.run import run_of
from hpctrain.report.comparison import (
    ABSENT,
    Column,
    ComparedRun,
    Comparison,
    group_name,
    group_table,
    loss_table,
    table,
)
from hpctrain.report.device_hours import SPENT, DeviceHours, read_device_hours
from hpctrain.report.html.charts.runs import RunCurves, run_charts
from hpctrain.report.html.page import render_page
from hpctrain.report.status import AT_WORK


@dataclass(frozen=True)
class _ReadRun:
    """What the page reads of a run besides its comparison."""

    rows: list[MetricRow]
    """One row for each step that led to the model."""
    start_s: float
    seq_len: int
    device_hours: DeviceHours | None


def write_comparison(title: str, compared: Comparison, baseline: int, target: Path, now: float) -> None:
    """Write the report of several runs as one HTML file that needs no network and no other file. A run whose files
    cannot be read is a row of the tables, without curves.

    Args:
        title: heading of the page.
        compared: the runs, in the order of the tables.
        baseline: position of the run with which the others are compared.
        target: file to write.
        now: seconds since 1970.

    Raises:
        UntrustedError: a file of a run is not trusted.
        StorageError: the target cannot be written.
    """
    with collector_paused():
        write_text(target, _page(title, compared, baseline, now))


def _page(title: str, compared: Comparison, baseline: int, now: float) -> str:
    read = [_read(row, now) for row in compared.runs]
    places = [at for at, run in enumerate(read) if run is not None and run.rows]
    curves = [
        RunCurves(compared.runs[at].name, run.rows, run.start_s, run.seq_len) for at in places if (run := read[at])
    ]
    names = [row.name for row in compared.runs]
    groups = {
        group_name(group): [places.index(at) for at in map(names.index, group.runs) if at in places]
        for group in compared.groups
    }
    return render_page(
        "comparison.html.j2",
        title=title,
        written=utc_text(now),
        charts=run_charts(curves, {name: group for name, group in groups.items() if len(group) > 1}),
        tables=[
            (heading, columns)
            for heading, columns in (
                ("Settings that differ", settings_table(compared.runs)),
                (f"Change against {names[baseline]}", change_table(compared, baseline)),
                (f"Training loss at equal {compared.progress.unit}", loss_table(compared)),
                ("Groups of seeds, mean ± 95 % t interval", group_table(compared.groups)),
                ("All figures", table(compared.runs)),
            )
            if columns
        ],
        costs=[(row, run.device_hours if run else None) for row, run in zip(compared.runs, read, strict=True)],
        spent=SPENT,
        verdict=verdict(compared.runs),
    )


def _read(row: ComparedRun, now: float) -> _ReadRun | None:
    """Return what the page reads of a run; None if its files cannot be read. Then `row.reason` has the error."""
    folder = Path(row.folder)
    try:
        run, rows = run_of(folder), read_metrics(folder / "metrics.jsonl")
        events = read_events(folder / "events.jsonl")
        attempts = read_jsonl(folder / ATTEMPTS_FILE)
    except FileError:
        return None
    device_hours = read_device_hours(folder, run, attempts, rows, events, now if row.state in AT_WORK else None)
    times = [event.time_s for event in events[:1]] + [first.time_s - first.step_time_s for first in rows[:1]]
    return _ReadRun(last_row_of_each_step(rows), min(times, default=now), run.data.seq_len, device_hours)


def verdict(rows: Sequence[ComparedRun]) -> str:
    """Return one sentence about the runs: how many are done, and which has the smallest loss."""
    done = sum(row.state == "done" for row in rows)
    text = f"{done} of {len(rows)} runs are done"
    kind = "validation loss" if all(row.valid_loss is not None for row in rows if row.loss is not None) else "loss"
    known = [(row.valid_loss if kind == "validation loss" else row.loss, row.name) for row in rows]
    best = min(((loss, name) for loss, name in known if loss is not None), default=None)
    return f"{text}; the smallest {kind} is {best[0]:.4f}, of {best[1]}." if best else f"{text}."


def settings_table(rows: Sequence[ComparedRun]) -> list[Column]:
    """Return the columns of the keys in which the runs differ; [] if they do not."""
    keys = list(rows[0].settings) if rows else []
    if not keys:
        return []
    columns = [Column(key, [_setting(row.settings[key]) for row in rows], False) for key in keys]
    return [Column("run", [row.name for row in rows], False), *columns]


def _setting(value: object) -> str:
    return ABSENT if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def change_table(compared: Comparison, baseline: int) -> list[Column]:
    """Return the columns of figures with their changes against the run at position `baseline`, in percent: the loss at
    the last point that all runs with a step reached, the validation loss, tokens per second, hours, node-hours and
    GPU-hours; [] for a single run. Columns without a value are left out."""
    rows = compared.runs
    if len(rows) < 2:
        return []
    base = rows[baseline]
    reached = [
        at
        for at in range(len(compared.progress.points))
        if all(row.losses[at] is not None for row in rows if row.loss is not None)
    ]
    columns = [Column("run", [f"{row.name} (baseline)" if row is base else row.name for row in rows], False)]
    figures: list[tuple[str, list[float | None], str]] = []
    if reached:
        title = f"loss at {compared.progress.points[reached[-1]]:,} {compared.progress.unit}"
        figures.append((title, [row.losses[reached[-1]] if row.losses else None for row in rows], ".4f"))
    figures += [
        ("valid loss", [row.valid_loss for row in rows], ".4f"),
        ("tokens/s", [row.tokens_per_s for row in rows], ",.0f"),
        ("hours", [row.hours for row in rows], ".3g"),
        ("node-h", [row.node_hours for row in rows], ".3g"),
        ("GPU-h", [row.gpu_hours for row in rows], ".3g"),
    ]
    for title, values, form in figures:
        if any(value is not None for value in values):
            columns.append(Column(title, [_changed(value, values[baseline], form) for value in values]))
    return columns


def _changed(value: float | None, base: float | None, form: str) -> str:
    if value is None:
        return ABSENT
    text = format(value, form)
    return text if not base or value is base else f"{text} ({value / base - 1:+.1%})".replace("%", " %")
