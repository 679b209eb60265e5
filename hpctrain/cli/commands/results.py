"""Commands that write or print results of runs: `report`, `compare`, `track`, `eval` and `export`; and `convert`, which
makes a Hugging Face folder of a checkpoint of another tool; and `trace`, a step as a trace file."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import Any, get_args

import click
from rich.table import Table

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_FAILED, HpctrainError, InputError, StorageError, UntrustedError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes
from hpctrain.cli.answers import JSON_OPTION, print_json, warn
from hpctrain.cli.options.parameters import FILE, FOLDER, PATH, RUN, RUNS
from hpctrain.cli.views.console import phases, table_console
from hpctrain.hf.convert.convert import convert
from hpctrain.hf.output import ExportFormat
from hpctrain.hf.tensors import BYTES, shard_bytes
from hpctrain.jobs.run_status import run_statuses
from hpctrain.jobs.tracking import FOLDER as TRACKING
from hpctrain.jobs.tracking import track
from hpctrain.launch.evaluate import CheckpointEvaluation, evaluate
from hpctrain.launch.export import export
from hpctrain.launch.predicted_step import predicted_spans
from hpctrain.records.history.step_spans import StepSpans, recorded_steps, spans_file
from hpctrain.records.run.run import run_of
from hpctrain.records.run.tracking import TrackerName
from hpctrain.report.comparison import (
    Column,
    Comparison,
    SortKey,
    compare,
    group_table,
    loss_table,
    sort_rows,
)
from hpctrain.report.comparison import table as comparison_table
from hpctrain.report.html.render import write_report
from hpctrain.report.html.several import write_comparison
from hpctrain.report.step_trace import PredictedSpan, step_trace
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import run_name
from hpctrain.runs.sweeps import NamedRuns


@click.command("report")
@click.argument("several", metavar="RUN|SWEEP...", type=RUNS, nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Default: report.html in RUN or in the folder of the sweep; of several, in the current folder.",
)
@click.option("--baseline", type=RUN, metavar="RUN", help="Run with which the others are compared. Default: the first.")
@JSON_OPTION
def report_command(several: tuple[NamedRuns, ...], output: Path | None, baseline: Path | None, as_json: bool) -> None:
    """Write the report.html of a run, of a sweep or of several runs.

    The report is one file that needs no network and no other file: what the device-hours were spent on, loss,
    throughput, learning rate, gradient norm, memory, times of stages and ranks, bytes sent, faults and recoveries, the
    plan compared with the measurements, the measured network, and notes on what to set next time. A run in progress
    has a report too.

    The report of several runs or of a sweep has the curves of all runs in the same charts, the settings in which they
    differ, and changes against the first run or --baseline. Runs that differ only in name and seed are one band.

    RUN is a run folder, a run's name or a job's id. Names and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then
    among the runs that you started anywhere; of several folders with that name the newest counts.
    """
    if output is None:
        # In the run folder only the owner may read the report; a report elsewhere is made to be shown.
        click.get_current_context().with_resource(owner_only())
    now, first = SystemClock().wall(), several[0]
    place = first.folder if len(several) == 1 else Path()
    target = output or place / "report.html"
    if len(several) == 1 and not first.is_sweep and baseline is None:
        write_report(first.folder, target, now, predicted_spans)
    else:
        named = [*([baseline.resolve()] if baseline else []), *(folder for item in several for folder in item.runs)]
        folders = list(dict.fromkeys(named))
        compared = _compared(folders)
        if first.is_sweep and len(several) == 1:
            compared = replace(compared, runs=sort_rows(compared.runs, "loss"))
        title = f"Sweep {run_name(first.folder.name)}" if first.is_sweep else f"{len(folders)} runs"
        at = [Path(row.folder) for row in compared.runs].index(folders[0])
        write_comparison(title, compared, at, target, now)
    print_json({"report": str(target)}) if as_json else click.echo(str(target))


@click.command("compare")
@click.argument("several", metavar="RUN|SWEEP...", type=RUNS, nargs=-1, required=True)
@click.option(
    "--sort", "key", type=click.Choice(get_args(SortKey)), default="loss", help="What comes first; loss: the smallest."
)
@JSON_OPTION
def compare_command(several: tuple[NamedRuns, ...], key: SortKey, as_json: bool) -> None:
    """Compare runs: settings in which they differ, state, losses, speed, time and cost; losses at equal steps.

    RUN is a run folder, a run's name or a job's id; SWEEP is the name or the folder of a sweep, or the id of its job
    array. `best` and `best valid` are the smallest losses so far. `--sort loss` takes the newest validation loss if
    every run has one, else the training loss.

    The second table has training losses at equal steps, or at equal tokens if steps have different numbers of tokens:
    at each fifth of the longest run, and where the shortest one ends. Each is a mean over the 2 % of the longest run
    before that point. Runs that differ only in name and seed are a group: the tables give its mean ± 95 % t interval.
    """
    folders = list(dict.fromkeys(folder for named in several for folder in named.runs))
    compared = _compared(folders)
    compared = replace(compared, runs=sort_rows(compared.runs, key))
    if as_json:
        print_json(compared.to_json())
        return
    _print_table(comparison_table(compared.runs))
    if losses := loss_table(compared):
        click.echo(f"\ntraining loss at equal {compared.progress.unit}")
        _print_table(losses)
    if groups := group_table(compared.groups):
        click.echo("\ngroups of seeds, mean ± 95 % t interval")
        _print_table(groups)


def _print_table(columns: list[Column]) -> None:
    shown = Table(box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*cells)
    table_console(pipe_width=WIDTH).print(shown)


WIDTH = 1000
"""Columns of a comparison that is not printed on a terminal, so that each run is one line."""


def _compared(folders: list[Path]) -> Comparison:
    """Return a comparison of the runs. Why a run is `unknown`, such as a damaged file, is printed on stderr."""
    compared = compare(folders, run_statuses(folders))
    warn([f"{row.name}: {row.reason}" for row in compared.runs if row.state == "unknown"])
    return compared


PROCESSES_MAX = 1024
"""Most processes of one machine."""
STEP_HELP = "The checkpoint of that step; 0: the model before training. Default: the newest."


@click.command("eval")
@click.argument("folder", metavar="RUN", type=RUN)
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option("--step", type=click.IntRange(min=0), help=STEP_HELP)
@click.option(
    "--split", type=click.Choice(["all", "train", "valid"]), default="all", help="Which part of corpus folders."
)
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="At most N sequences of each. Default: all.")
@click.option(
    "--processes", type=click.IntRange(1, PROCESSES_MAX), metavar="N", default=1, show_default=True,
    help="Processes of this machine that share the sequences; with GPUs, one a GPU.",
)  # fmt: skip
@click.option(
    "--pp", type=click.IntRange(1, PROCESSES_MAX), metavar="P", default=1, show_default=True,
    help="Pipeline stages into which each copy of the model is cut, one a process; divides N.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def eval_command(folder: Path, data: tuple[str, ...], as_json: bool, **which: Any) -> None:
    """Loss and perplexity of a run's checkpoint on other data.

    DATA is a folder made by `hpctrain data prepare` with the run's tokenizer, or text (files, folders, .gz), which is
    tokenized into a temporary folder. Each DATA gets its own loss, by the run's objective. The checkpoint may be of any
    plan, and the run may still be in progress. The processes all run on this machine; with --pp, none of them holds the
    whole model. The loss does not depend on their number.

    Only whole sequences of data.seq_len tokens count; a shorter rest at the end of a shard is left out. By default all
    of them are evaluated, and millions of tokens take minutes on processors. `--samples N` takes the first N,
    `--split valid` the held-out part. The progress is shown on stderr.
    """
    with phases() as progress:
        done, judged = evaluate(folder, data, **which, runner=SystemRunner(), progress=progress)
    if as_json:
        rows = [{key: value for key, value in asdict(item).items() if value is not None} for item in judged]
        click.echo(json.dumps({"folder": str(folder), "step": done, "data": rows}, allow_nan=False))
        return
    click.echo(f"{folder.name} after step {done}")
    width = max(len(item.path) for item in judged)
    for item in judged:
        click.echo(f"  {item.path:<{width}}  {_words(item)}")


def _words(item: CheckpointEvaluation) -> str:
    shown = "too large to tell" if item.perplexity is None else f"{item.perplexity:.4g}"
    return f"loss {item.loss:.4f}  perplexity {shown}  {item.tokens:,} tokens"


@click.command()
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder to make.")
@click.option("--step", type=click.IntRange(min=0), help=STEP_HELP)
@click.option(
    "--dtype", type=click.Choice(list(BYTES)), default="float32", help="Type of the numbers; float32 loses nothing."
)
@click.option(
    "--format", "file_format", type=click.Choice(get_args(ExportFormat)), default="hf",
    help="hf: safetensors files for transformers; dcp: torch's distributed checkpoint, with the same names.",
)  # fmt: skip
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="The largest file; dcp has one a tensor.")
@click.option(
    "--processes", type=click.IntRange(1, PROCESSES_MAX), metavar="N", default=1, show_default=True,
    help="Processes that share the tensors; each holds one tensor at a time.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the model that lies in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def export_command(
    folder: Path, output: Path, step: int | None, dtype: str, file_format: ExportFormat, max_shard_size: str,
    processes: int, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a run's checkpoint as a Hugging Face folder: weights, config.json, tokenizer and a model card.

    The checkpoint may be of any plan, and the run may still be in progress. `AutoModel…from_pretrained(DIR)` of
    transformers loads the folder; hpctrain itself needs no transformers. A model of your own (model.import) is written
    as safetensors files with its own names, and a README.md that says how your code loads them.
    """
    done = export(
        folder, output, step, dtype, shard_bytes(max_shard_size), force, SystemRunner(), processes, file_format
    )
    warn(done.warnings)
    if as_json:
        click.echo(json.dumps({"folder": str(output.resolve()), **asdict(done)}))
        return
    click.echo(f"{output}: {done.architecture} after step {done.step}, {done.parameters:,} parameters")
    click.echo(f"  {_file_names(done.files)}: {format_bytes(done.size_bytes)}")


def _file_names(names: list[str]) -> str:
    """Return the names of the files of a model, with the files of a DCP's tensors as their number."""
    parts = [name for name in names if name.endswith(".distcp")]
    return ", ".join([*(name for name in names if name not in parts), *[f"{len(parts)} *.distcp"] * bool(parts)])


@click.command("convert")
@click.argument("source", metavar="CHECKPOINT", type=FOLDER)
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder to make.")
@click.option(
    "--config", "config_file", type=FILE, metavar="FILE",
    help="The model's config.json. Default: the one in CHECKPOINT, if there is one.",
)  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of config.json.")
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="The largest file.")
@click.option("--force", is_flag=True, help="Replace the model that lies in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def convert_command(
    source: Path, output: Path, config_file: Path | None, overrides: tuple[str, ...], max_shard_size: str, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a Hugging Face folder of a checkpoint of another tool, for `model.hf` of a run file.

    CHECKPOINT is the folder of one step: a torchtitan llama3, a Megatron-Core GPT (torch_dist, or mp_rank_… files), or
    a torch distributed checkpoint (DCP) with the names of transformers. Sizes come from the tensors and from Megatron's
    arguments; what they do not tell comes from --config and --set. Nothing in the checkpoint is run, and the numbers
    stay as they are, bit by bit.
    """
    done = convert(source, output, config_file, overrides, shard_bytes(max_shard_size), force)
    if as_json:
        click.echo(json.dumps({"folder": str(output.resolve()), **asdict(done)}))
        return
    click.echo(f"{output}: {done.architecture} from {done.tool}, {done.parameters:,} numbers")
    click.echo(f"  {_file_names(done.files)}: {format_bytes(done.size_bytes)}")


@click.command("trace")
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("--step", type=click.IntRange(min=1), help="Default: the newest step that was recorded.")
@click.option("-o", "--output", type=FILE, help="Default: RUN/profile/step-STEP.trace.json.")
@JSON_OPTION
def trace_command(folder: Path, step: int | None, output: Path | None, as_json: bool) -> None:
    """Write a step of a run as a trace of all ranks, for ui.perfetto.dev or chrome://tracing.

    Each rank is a process with threads for computation, communication, and communication beside computation; arrows
    lead from sends to receives. Below each rank is what the planner predicted for it. The steps are those of
    `profile.spans` in the run file; times are those of the host. For the kernels of a GPU, see `train --profile`.

    RUN is a run folder, a run's name or a job's id. Names and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then
    among the runs that you started anywhere; of several folders with that name the newest counts.
    """
    steps = recorded_steps(folder)
    step = steps[-1] if step is None and steps else step
    if step not in steps:
        which = f"recorded are {', '.join(map(str, steps))}" if steps else "no step was recorded yet"
        wanted = "a step" if step is None else f"step {step}"
        advice = f"to record {wanted}, name it in the run file (profile.spans: [20]) before the run comes to it"
        raise InputError(f"--step: {'found ' + str(step) + '; ' if step else ''}{which}; {advice}")
    record = StepSpans.read(spans_file(folder, step), owned=True)
    predicted: list[PredictedSpan] = []
    try:
        predicted = predicted_spans(folder, record.generation)
    except UntrustedError:
        raise
    except HpctrainError as error:
        warn([f"the trace has no predicted step: {error}"])
    if output is None:
        click.get_current_context().with_resource(owner_only())
    target = output or folder / "profile" / f"step-{step}.trace.json"
    write_text(target, json.dumps(step_trace(record, predicted), allow_nan=False))
    if as_json:
        print_json({"trace": str(target), "step": step, "ranks": len(record.ranks), "predicted": bool(predicted)})
    else:
        click.echo(f"{target}: step {step}; open it at ui.perfetto.dev or chrome://tracing")


LOOK_S = 5.0
"""Seconds between two looks at the run's files."""


@click.command("track")
@click.argument("folder", metavar="RUN", type=RUN)
@click.option(
    "--to", "named", type=click.Choice(get_args(TrackerName)), multiple=True, help="Default: those of the run file."
)
@click.option("-o", "--output", type=FOLDER, help="Default: `tracking.output` of the run file, or RUN/tracking.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over, or until Ctrl-C or SIGTERM.")
def track_command(folder: Path, named: tuple[TrackerName, ...], output: Path | None, follow: bool) -> None:
    """Write the metrics of a run into trackers: TensorBoard, MLflow, Weights & Biases, Prometheus.

    Each tracker gets what it does not have yet, so you can repeat the command. Slurm jobs and local runs whose run file
    names trackers do this by themselves while they go on; after a killed job this command adds the rest. The exit code
    is 1 if a tracker failed; the others are complete.

    RUN is a run folder, a run's name or a job's id. Names and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then
    among the runs that you started anywhere; of several folders with that name the newest counts.
    """
    tracking = run_of(folder).tracking
    names = named or tuple(tracking.trackers)
    if not names:
        raise InputError(f"{folder.name}: its run file names no tracker (tracking.trackers); give one with --to")
    output = output or Path(tracking.output or folder / TRACKING)
    clock, stopped, failed = SystemClock(), Flag(), []
    attempt = os.environ.get("HPCTRAIN_ATTEMPT", "")

    def fail(name: TrackerName, reason: str) -> None:
        failed.append(name)
        warn([reason])
        if attempt.isdecimal():  # started by the run itself
            try:
                RunFolder(folder).append_event("tracker_failed", reason, int(attempt), clock.wall(), tracker=name)
            except StorageError as error:
                warn([f"event not written: {error}"])

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    track(folder, names, output, clock, fail, partial(stopped.wait, LOOK_S) if follow else None)
    sys.exit(EXIT_FAILED if failed else 0)
