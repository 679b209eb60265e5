"""Compares runs by their files: the settings in which they differ, losses, speed and use of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.errors import HpctrainError
from hpctrain.records.history.run_log import MetricRow, last_row_of_each_step, read_metrics
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.equal_progress import EqualProgress, equal_progress, losses_at
from hpctrain.report.seed_groups import MeanInterval, groups_by_seed, mean_interval
from hpctrain.report.status import RunStatus
from hpctrain.report.summaries import losses_by_set, steady_mfu, steady_tokens_per_s

ABSENT = "–"
SortKey = Literal["loss", "name", "tokens_per_s", "node_hours"]


@dataclass(frozen=True)
class ComparedRun:
    """A row of a comparison. A value that is not known is None."""

    name: str
    """Name of the run."""
    folder: str
    """Path of the run folder."""
    settings: dict[str, Any]
    """Keys of the run file in which the compared runs differ, with this run's values."""
    state: str
    """State of the run; `unknown` also for a run whose files cannot be read."""
    reason: str
    """One sentence that says why the run has this state."""
    step: int = 0
    """Number of steps done."""
    steps: int = 0
    """Number of steps of the run file."""
    loss: float | None = None
    """Training loss of the last step, in nats."""
    best_loss: float | None = None
    """Smallest training loss of a step, in nats; losses of single steps scatter."""
    valid_loss: float | None = None
    """Newest validation loss, in nats; with several validation sets, that of the first."""
    best_valid_loss: float | None = None
    """Smallest validation loss so far, in nats, of the same validation set."""
    tokens_per_s: float | None = None
    """Median over the steps of the whole job's tokens per second, without the first step of each generation."""
    mfu: float | None = None
    """Median over the steps of the model FLOPs utilization, without the first step of each generation."""
    tokens: int | None = None
    """Tokens that the model has read in the steps that count."""
    losses: list[float | None] = field(default_factory=list)
    """Training loss in nats at each point of `Comparison.progress`, as `losses_at` returns it."""
    hours: float | None = None
    """Hours of all attempts, summed; pauses between them do not count."""
    node_hours: float | None = None
    """Hours of each attempt times its nodes, summed."""
    gpu_hours: float | None = None
    """Hours of each attempt times its GPUs, summed; None without GPUs, or if their number is not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class SeedGroup:
    """Two or more runs that differ only in name and seed. A mean is None if fewer than two of them have a value."""

    runs: list[str]
    """Names of the runs."""
    seeds: list[int]
    """Seed of each run."""
    settings: dict[str, Any]
    """Keys of the run file in which the compared runs differ, except the seed, with the value of this group."""
    losses: list[MeanInterval | None]
    """Mean training loss in nats at each point of `Comparison.progress`."""
    valid_loss: MeanInterval | None
    """Mean of the newest validation losses, in nats."""
    best_valid_loss: MeanInterval | None
    """Mean of the smallest validation losses, in nats."""
    tokens_per_s: MeanInterval | None
    """Mean of the runs' tokens per second."""
    hours: MeanInterval | None
    """Mean hours of a run."""
    node_hours: MeanInterval | None
    """Mean node-hours of a run."""
    gpu_hours: MeanInterval | None
    """Mean GPU-hours of a run."""


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared: a row for each, their groups, and the points at which losses are compared."""

    progress: EqualProgress
    runs: list[ComparedRun]
    groups: list[SeedGroup]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values, with the keys `unit`, `points`, `runs` and `groups`."""
        values = asdict(self)
        return {**values.pop("progress"), **values}


def compare(folders: Sequence[Path], statuses: Sequence[RunStatus | HpctrainError]) -> Comparison:
    """Return a comparison with a row for each run, in the order of `folders`. A run whose files cannot be read has the
    state `unknown`, and the error as its reason.

    Args:
        folders: run folders.
        statuses: the status of each run, or the error that prevents one.
    """
    runs = [_run_if_readable(folder) for folder in folders]
    rows, histories = [], []
    for folder, status, settings in zip(folders, statuses, _differences(runs), strict=True):
        metrics: list[MetricRow] = []
        try:
            if isinstance(status, HpctrainError):
                raise status
            metrics = read_metrics(folder / "metrics.jsonl")
            rows.append(_row(folder, metrics, status, settings))
        except HpctrainError as error:
            rows.append(ComparedRun(folder.name, str(folder), settings, "unknown", str(error)))
        histories.append(last_row_of_each_step(metrics))
    progress = equal_progress(histories)
    rows = [replace(row, losses=losses_at(history, progress)) for row, history in zip(rows, histories, strict=True)]
    return Comparison(progress, rows, _groups(runs, rows))


def _groups(runs: Sequence[Run | None], rows: Sequence[ComparedRun]) -> list[SeedGroup]:
    settings = [None if run is None else flat_values(run.to_json()) for run in runs]
    return [
        _group([rows[at] for at in group], [run.seed for at in group if (run := runs[at]) is not None])
        for group in groups_by_seed(settings)
    ]


def _group(rows: Sequence[ComparedRun], seeds: list[int]) -> SeedGroup:
    return SeedGroup(
        runs=[row.name for row in rows],
        seeds=seeds,
        settings={key: value for key, value in rows[0].settings.items() if key != "seed"},
        losses=[mean_interval(losses) for losses in zip(*(row.losses for row in rows), strict=True)],
        valid_loss=mean_interval([row.valid_loss for row in rows]),
        best_valid_loss=mean_interval([row.best_valid_loss for row in rows]),
        tokens_per_s=mean_interval([row.tokens_per_s for row in rows]),
        hours=mean_interval([row.hours for row in rows]),
        node_hours=mean_interval([row.node_hours for row in rows]),
        gpu_hours=mean_interval([row.gpu_hours for row in rows]),
    )


def _run_if_readable(folder: Path) -> Run | None:
    try:
        return run_of(folder)
    except HpctrainError:
        return None


def _row(folder: Path, metrics: list[MetricRow], status: RunStatus, settings: dict[str, Any]) -> ComparedRun:
    history = last_row_of_each_step(metrics)
    valid = [losses[0] for row in history if (losses := list(losses_by_set(row).values()))]
    return ComparedRun(
        name=folder.name,
        folder=str(folder),
        settings=settings,
        state=status.state,
        reason=status.reason,
        step=status.step,
        steps=status.steps,
        loss=status.loss,
        best_loss=min((row.loss for row in history), default=None),
        valid_loss=valid[-1] if valid else None,
        best_valid_loss=min(valid, default=None),
        tokens_per_s=steady_tokens_per_s(metrics),
        mfu=steady_mfu(metrics),
        tokens=sum(row.tokens for row in history) if history else None,
        hours=status.hours,
        node_hours=status.node_hours,
        gpu_hours=status.gpu_hours,
    )


def sort_rows(rows: Sequence[ComparedRun], key: SortKey) -> list[ComparedRun]:
    """Return the rows sorted by name, by the smallest loss, by the most tokens per second, or by the fewest node-hours;
    rows without a value for `key` come last.

    The loss is the newest validation loss if every run with a training loss has a validation loss too, else the
    training loss of the last step.
    """
    if key == "name":
        return sorted(rows, key=lambda row: row.name)
    is_validated = all(row.valid_loss is not None for row in rows if row.loss is not None)

    def value(row: ComparedRun) -> float | None:
        if key == "loss":
            return row.valid_loss if is_validated else row.loss
        return None if row.tokens_per_s is None else -row.tokens_per_s if key == "tokens_per_s" else row.node_hours

    return sorted(rows, key=lambda row: (value(row) is None, value(row) or 0.0))


def _differences(runs: Sequence[Run | None]) -> list[dict[str, Any]]:
    """Return for each run the keys of the run file, except the name, in which the runs differ, with the run's values. A
    key that the run leaves out has the value None. All keys of a run whose file cannot be read have the value None.

    Args:
        runs: the run files; None for one that cannot be read.
    """
    flat = [{} if run is None else flat_values(run.to_json()) for run in runs]
    known = [values for values in flat if values]
    keys = dict.fromkeys(key for values in known for key in values if key != "name")
    differing = [key for key in keys if any(values.get(key) != known[0].get(key) for values in known)]
    return [{key: values.get(key) for key in differing} for values in flat]


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by one name each, with dots: {"model": {"layers": 2}} -> {"model.layers": 2}. Lists stay
    whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_values(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class Column:
    """A column of the table of a comparison, as text."""

    title: str
    cells: list[str]
    is_number: bool = True
    """Whether the cells are numbers, which are aligned to the right."""


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
        ("tokens", [row.tokens for row in rows], ",.0f"),
        ("hours", [row.hours for row in rows], ".3g"),
        ("node-h", [row.node_hours for row in rows], ".3g"),
        ("GPU-h", [row.gpu_hours for row in rows], ".3g"),
    )
    for title, values, form in optional:
        if any(value is not None for value in values):
            columns.append(Column(title, [ABSENT if value is None else format(value, form) for value in values]))
    return columns


def _value_text(value: object) -> str:
    return ABSENT if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def loss_table(comparison: Comparison) -> list[Column]:
    """Return the columns of the table of losses at equal steps or tokens as text: a row for each run, then one for each
    group with mean ± half width of its 95 % t interval. [] without steps."""
    runs, groups, progress = comparison.runs, comparison.groups, comparison.progress
    if not progress.points:
        return []
    columns = [Column("run", [*(row.name for row in runs), *map(group_name, groups)], False)]
    for at, point in enumerate(progress.points):
        cells = [ABSENT if row.losses[at] is None else f"{row.losses[at]:.4f}" for row in runs]
        columns.append(Column(f"{point:,}", [*cells, *(_mean_text(group.losses[at], ".4f") for group in groups)]))
    return columns


def group_table(groups: Sequence[SeedGroup]) -> list[Column]:
    """Return the columns of the table of groups of seeds as text: settings, then mean ± half width of the 95 % t
    interval. Columns in which no group has a value are left out; [] without groups."""
    if not groups:
        return []
    columns = [Column("group", [group_name(group) for group in groups], False)]
    for key in groups[0].settings:
        columns.append(Column(key, [_value_text(group.settings[key]) for group in groups], False))
    optional: tuple[tuple[str, list[MeanInterval | None], str], ...] = (
        ("valid", [group.valid_loss for group in groups], ".4f"),
        ("best valid", [group.best_valid_loss for group in groups], ".4f"),
        ("tokens/s", [group.tokens_per_s for group in groups], ",.0f"),
        ("hours", [group.hours for group in groups], ".3g"),
        ("node-h", [group.node_hours for group in groups], ".3g"),
        ("GPU-h", [group.gpu_hours for group in groups], ".3g"),
    )
    for title, values, form in optional:
        if any(value is not None for value in values):
            columns.append(Column(title, [_mean_text(value, form) for value in values]))
    return columns


def group_name(group: SeedGroup) -> str:
    """Return the name of a group, such as '3 seeds (0, 1, 2) as NAME'."""
    return f"{len(group.runs)} seeds ({', '.join(map(str, group.seeds))}) as {group.runs[0]}"


def _mean_text(value: MeanInterval | None, form: str) -> str:
    return ABSENT if value is None else f"{format(value.mean, form)} ± {format(value.half_width, form)}"
