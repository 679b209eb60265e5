"""`hpctrain bench recovery`: measures what faults cost a job on a lab, and prints tables."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import EXIT_FAILED, InputError
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.cli.bench.lab import on_lab
from hpctrain.cli.bench.output import bench_console, echo_json, machine_text
from hpctrain.cli.views.console import Console

CASES = ("worker_killed", "node_killed", "node0_killed", "node_silent")
SYSTEMS = ("hpctrain", "hpctrain-memory-off", "torchrun", "requeue")


@click.command("recovery")
@click.option("--lab", is_flag=True, help="On the lab that is up. Needed, as there is no other form yet.")
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True, help="Faults of each case.")
@click.option(
    "--others", type=click.IntRange(1), default=3, show_default=True,
    help="Faults of each case for torchrun and requeue.",
)  # fmt: skip
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), help="Only this; may be given again.")
@click.option("--system", "systems", multiple=True, type=click.Choice(SYSTEMS), help="Only this; may be repeated.")
@click.option(
    "--state", "state_mb", type=click.FloatRange(0.1), default=200.0, show_default=True,
    help="Parameters and moments of a rank, in MB, at least.",
)  # fmt: skip
@click.option("--nodes", type=click.IntRange(2, 4), default=4, show_default=True, help="Nodes of each job.")
@click.option(
    "--limit", "limit_s", type=click.FloatRange(1.0), default=120.0, show_default=True,
    help="Seconds after a fault at which a job counts as not recovered.",
)  # fmt: skip
@click.option(
    "--reference", type=click.IntRange(0), default=60, show_default=True,
    help="Steps of a run without faults, with whose losses those of hpctrain are compared.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for samples and files of the jobs; a bench that was ended goes on with what is missing.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def recovery(
    lab: bool, repeats: int, others: int, cases: tuple[str, ...], systems: tuple[str, ...], state_mb: float,
    nodes: int, limit_s: float, reference: int, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure the time from a fault to the next step, and the steps that it cost, beside torchrun's elastic restart
    and a plain job that Slurm requeues.

    All train the same model on the same nodes of the lab that is up (`hpctrain lab up`); needs root. Exit code 1: a
    run of hpctrain did not recover.
    """
    if not lab:
        raise InputError("bench recovery: give --lab; start a lab with `hpctrain lab up` first")
    from hpctrain.bench.recovery import lab_recovery
    from hpctrain.bench.recovery.lab_jobs import TrainingSettings, spec_of

    settings = lab_recovery.RecoverySettings(
        cases=cases or CASES, systems=systems or SYSTEMS, training=TrainingSettings(spec_of(int(state_mb * 1e6))),
        repeats=repeats, others=others, nodes=nodes, limit_s=limit_s, reference_steps=reference,
    )  # fmt: skip
    people = bench_console(as_json, 140)
    with contextlib.ExitStack() as files:
        if output is None:
            folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="hpctrain-bench-")))
        else:
            folder = output.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        record = on_lab(lab_recovery.measure, settings, folder)
    _show(record, people)
    echo_json(record, as_json)
    if any(row["not_recovered"] for row in record["rows"] if row["system"].startswith(lab_recovery.OWN)):
        sys.exit(EXIT_FAILED)


def _show(record: dict[str, Any], people: Console) -> None:
    settings = record["settings"]
    state = format_bytes(settings["training"]["state_bytes"])
    table = Table(
        "case", "system", "n", "median", "p95", "quartiles", "caught up", "lost", "redone", "a step", "loss differs by",
        title=f"bench recovery: from fault to next step, less one step; {state} a rank, {settings['nodes']} nodes",
    )  # fmt: skip
    for row in record["rows"]:
        if "median_s" not in row:
            table.add_row(row["case"], row["system"], f"0 of {row['not_recovered']}", row.get("reason", ""))
            continue
        loss = f"{row['loss_difference_max']:.2g}" if "loss_difference_max" in row else ""
        count = f"{row['n']} of {row['n'] + row['not_recovered']}" if row["not_recovered"] else str(row["n"])
        table.add_row(
            row["case"], row["system"], count, *(format_seconds(row[key]) for key in ("median_s", "p95_s")),
            f"{format_seconds(row['low_s'])} to {format_seconds(row['high_s'])}", format_seconds(row["caught_up_s"]),
            str(row["lost_steps_max"]), str(row["redone_steps_max"]), format_seconds(row["step_s"]), loss,
        )  # fmt: skip
    people.print(table)
    if record["ratios"]:
        ratios = Table("case", "against", "ratio", "90 %", "pairs", title="hpctrain's time divided by another's")
        for row in record["ratios"]:
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            ratios.add_row(row["case"], row["against"], f"{row['ratio']:.3f}", interval, str(row["pairs"]))
        people.print(ratios)
    people.print(machine_text(record, torch="torch", python="Python"), soft_wrap=True)
