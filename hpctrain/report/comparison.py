"""Compares runs by their files: the settings in which they differ, losses, speed and use of the cluster. Also the page
of a sweep with all loss curves in one chart."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import FileError
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.ledger import ATTEMPTS_FILE
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.run.run import Run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.charts import Chart, Trace, layout, line, thinned
from hpctrain.report.render import plotly_script, render_page
from hpctrain.report.status import RunStatus
from hpctrain.report.summaries import losses_by_set, steady_mfu, steady_tokens_per_s

SortKey = Literal["loss", "name", "tokens_per_s", "node_hours"]


@dataclass(frozen=True)
class ComparedRun:
    """A row of a comparison. A value that is not known is None."""

    name: str
    folder: str
    settings: dict[str, Any]
    """Keys of the run file in which the compared runs differ, with this run's values."""
    state: str
    step: int
    steps: int
    loss: float | None
    """Training loss of the last step, in nats."""
    best_loss: float | None
    """Smallest training loss of a step; losses of single steps scatter."""
    valid_loss: float | None
    """Newest validation loss, in nats; with several validation sets, that of the first."""
    best_valid_loss: float | None
    tokens_per_s: float | None
    """Median tokens per second of the whole job, without the first step of each generation."""
    mfu: float | None
    """Median model FLOPs utilization, without the first step of each generation."""
    node_hours: float
    """Hours of its jobs times their nodes."""
    gpu_hours: float | None
    """Hours of its jobs times their GPUs; None without GPUs, or if their number is not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def compare(folders: Sequence[Path], statuses: Sequence[RunStatus], now: float) -> list[ComparedRun]:
    """Return a row for each run, in the order of `folders`.

    Args:
        folders: run folders.
        statuses: the status of each run.
        now: seconds since 1970, up to which an attempt without an end counts if its run has not ended.

    Raises:
        FileError: a file of a run is damaged.
    """
    runs = [run_of(folder) for folder in folders]
    differences = _differences(runs)
    rows = []
    for folder, run, status, settings in zip(folders, runs, statuses, differences, strict=True):
        metrics = read_metrics(folder / "metrics.jsonl")
        history = last_row_of_each_step(metrics)
        valid = [losses[0] for row in history if (losses := list(losses_by_set(row).values()))]
        is_over = status.state in ("done", "failed", "cancelled")
        attempts, end = read_jsonl(folder / ATTEMPTS_FILE), history[-1].time_s if is_over and history else now
        gpus = _gpus_of_nodes(folder, run)
        rows.append(
            ComparedRun(
                name=folder.name,
                folder=str(folder),
                settings=settings,
                state=status.state,
                step=status.step,
                steps=status.steps,
                loss=status.loss,
                best_loss=min((row.loss for row in history), default=None),
                valid_loss=valid[-1] if valid else None,
                best_valid_loss=min(valid, default=None),
                tokens_per_s=steady_tokens_per_s(metrics),
                mfu=steady_mfu(metrics),
                node_hours=_hours(attempts, end, lambda node: 1.0),
                gpu_hours=None if gpus is None else _hours(attempts, end, gpus),
            )
        )
    return rows


def sort_rows(rows: Sequence[ComparedRun], key: SortKey) -> list[ComparedRun]:
    """Return the rows sorted by name, by the smallest loss, by the most tokens per second, or by the fewest node-hours;
    rows without the value come last.

    The loss is the newest validation loss if every run that has a loss has one, else the training loss of the last
    step.
    """
    if key == "name":
        return sorted(rows, key=lambda row: row.name)
    is_validated = all(row.valid_loss is not None for row in rows if row.loss is not None)

    def value(row: ComparedRun) -> float | None:
        if key == "loss":
            return row.valid_loss if is_validated else row.loss
        return None if row.tokens_per_s is None else -row.tokens_per_s if key == "tokens_per_s" else row.node_hours

    return sorted(rows, key=lambda row: (value(row) is None, value(row) or 0.0))


def _differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each run the keys of the run file, except the name, in which the runs differ, with their values. A key
    that a run leaves out has the value None."""
    flat = [_flat(run.to_json()) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values if key != "name")
    differing = [key for key in keys if any(values.get(key) != flat[0].get(key) for values in flat)]
    return [{key: values.get(key) for key in differing} for values in flat]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _hours(attempts: Sequence[Mapping[str, Any]], end: float, weight: Callable[[str], float]) -> float:
    """Return the hours of the attempts times the weights of their nodes.

    Args:
        end: seconds since 1970, up to which an attempt counts that has no end.
        weight: returns the weight of a node, by its name.
    """
    return sum(
        max(0.0, float(line.get("end", end)) - float(line["start"])) * sum(map(weight, line.get("nodes", ()))) / 3600.0
        for line in attempts
        if "start" in line
    )


def _gpus_of_nodes(folder: Path, run: Run) -> Callable[[str], float] | None:
    """Return a function that returns the number of GPUs that the run has on a node; None without GPUs, or if it is not
    known.

    The number is `cluster.devices_per_node`; without it, that of the GPUs that the run's probe found on the node.
    """
    if run.cluster.device == "cpu":
        return None
    if (named := run.cluster.devices_per_node) is not None:
        return lambda node: float(named)
    try:
        nodes = Topology.read(folder / "topology.json", owned=True).nodes
    except FileError:
        return None
    counts = {node.id: sum(device.id.startswith("cuda") for device in node.devices) for node in nodes}
    most = max(counts.values(), default=0)
    return (lambda node: float(counts.get(node, most))) if most else None


@dataclass(frozen=True)
class Column:
    """A column of the table of a comparison, as text."""

    title: str
    cells: list[str]
    is_number: bool = True


def table(rows: Sequence[ComparedRun]) -> list[Column]:
    """Return the columns of a comparison as text. Columns in which no run has a value are left out."""
    columns = [Column("run", [row.name for row in rows], False)]
    for key in rows[0].settings if rows else ():
        columns.append(Column(key, [_value_text(row.settings[key]) for row in rows], False))
    columns += [
        Column("state", [row.state for row in rows], False),
        Column("step", [f"{row.step}/{row.steps}" for row in rows]),
    ]
    optional: tuple[tuple[str, list[float | None], str], ...] = (
        ("loss", [row.loss for row in rows], ".4f"),
        ("best", [row.best_loss for row in rows], ".4f"),
        ("valid", [row.valid_loss for row in rows], ".4f"),
        ("best valid", [row.best_valid_loss for row in rows], ".4f"),
        ("tokens/s", [row.tokens_per_s for row in rows], ",.0f"),
        ("MFU", [row.mfu for row in rows], ".1%"),
        ("node-h", [row.node_hours for row in rows], ".3g"),
        ("GPU-h", [row.gpu_hours for row in rows], ".3g"),
    )
    for title, values, form in optional:
        if any(value is not None for value in values):
            columns.append(Column(title, ["–" if value is None else format(value, form) for value in values]))
    return columns


def _value_text(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def write_comparison(title: str, rows: Sequence[ComparedRun], target: Path, now: float) -> None:
    """Write a comparison as one HTML file that needs no network and no other file: the loss curves in one chart each,
    and the table.

    Args:
        title: heading of the page.
        rows: the runs, in the order of the table.
        target: file to write.
        now: seconds since 1970.

    Raises:
        InputError: plotly is not installed.
        FileError: a file of a run is damaged.
        StorageError: the target cannot be written.
    """
    script = plotly_script()
    histories = [(row.name, last_row_of_each_step(read_metrics(Path(row.folder) / "metrics.jsonl"))) for row in rows]
    valid = [
        (name, [(row.step, losses[0]) for row in history if (losses := list(losses_by_set(row).values()))])
        for name, history in histories
    ]
    trained = [(name, [(row.step, row.loss) for row in thinned(history)]) for name, history in histories]
    charts = [
        chart
        for chart in (
            _loss_chart("loss", "Training loss (nats a token)", trained),
            _loss_chart("valid", "Validation loss (nats a token)", valid),
        )
        if chart is not None
    ]
    page = render_page(
        "comparison.html.j2", title=title, written=utc_text(now), charts=charts, columns=table(rows), plotly=script
    )
    write_text(target, page)


def _loss_chart(name: str, title: str, curves: Sequence[tuple[str, list[tuple[int, float]]]]) -> Chart | None:
    traces: list[Trace] = []
    for number, (name_of_run, points) in enumerate(curves):
        if points:
            run = html.escape(name_of_run, quote=False)  # plotly would interpret HTML in a name
            hover = f"{run} %{{y:.4f}} after step %{{x}}<extra></extra>"
            traces.append(line(run, [step for step, _ in points], [loss for _, loss in points], number, hover))
    note = "Mean cross-entropy, a line for each run. A click on a name hides or shows its line."
    return Chart(name, title, note, traces, layout("step"), 420) if traces else None
