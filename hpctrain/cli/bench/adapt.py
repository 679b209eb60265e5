"""`hpctrain bench adapt`: measures on a lab when a run takes another plan, and prints a table."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_seconds
from hpctrain.cli.bench.lab import new_lab
from hpctrain.cli.bench.output import bench_console, echo_json, machine_text, say
from hpctrain.cli.views.console import Console

CASES = ("node", "link", "quiet", "noisy", "flapping", "ablation")


@click.command("adapt")
@click.option("--lab", is_flag=True, help="On a lab of its own. Needed, as there is no other form yet.")
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), help="Only this; may be given again.")
@click.option(
    "--steps", type=click.IntRange(100), default=1000, show_default=True, help="Of the cases quiet, noisy and flapping."
)
@click.option(
    "--after", type=click.IntRange(20), default=64, show_default=True, help="Steps before plans are compared first."
)
@click.option(
    "--at", type=click.IntRange(40), default=200, show_default=True, help="Step after which something becomes slower."
)
@click.option(
    "--limit", "limit_s", type=click.FloatRange(1.0), default=120.0, show_default=True,
    help="Seconds to wait for 90 % of the predicted throughput.",
)  # fmt: skip
@click.option("--flap", type=click.IntRange(10), default=60, show_default=True, help="Steps for which a node is slow.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Runs of each mode (ablation).")
@click.option(
    "--target", "target_loss", type=click.FloatRange(0.0), default=2.6, show_default=True,
    help="Loss at which a run of the ablation ends, in nats.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for rows and files of the runs; a bench that was ended goes on with what is missing.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def adapt(
    lab: bool, cases: tuple[Any, ...], steps: int, after: int, at: int, limit_s: float, flap: int, repeats: int,
    target_loss: float, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure when a run takes another plan: a node or a link becomes slower or recovers, or nodes are only noisy.

    Brings up a lab of four nodes, each with 40 % of a core; needs root. `ablation` compares the modes of `adapt.mode`
    by the time to a target loss.
    """
    if not lab:
        raise InputError("bench adapt: give --lab; it brings up a lab of its own")
    from hpctrain.bench.adapt import lab_adapt

    settings = lab_adapt.AdaptSettings(
        cases=cases or CASES, steps=steps, after=after, at=at, limit_s=limit_s, flap_steps=flap, seeds=repeats,
        target_loss=target_loss,
    )  # fmt: skip
    people = bench_console(as_json, 140)
    with contextlib.ExitStack() as files:
        if output is None:
            folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="hpctrain-bench-")))
        else:
            folder = output.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        machine, layout = files.enter_context(new_lab(lab_adapt.LAB))
        record = lab_adapt.measure(machine, layout, settings, folder, say)
    _show(record, people)
    echo_json(record, as_json)


def _show(record: dict[str, Any], people: Console) -> None:
    names = "case", "what", "mode", "seed", "step before", "predicted", "step after", "90 % after", "plans", "to target"
    table = Table(*names, title="bench adapt: four nodes with 40 % of a core each")
    for row in record["rows"]:
        times = [format_seconds(row[key]) if key in row else "" for key in ("before_s", "predicted_s", "after_s")]
        reached = format_seconds(row["reached_s"]) if "reached_s" in row else "never" if "predicted_s" in row else ""
        plans = f"{len(row['adapted'])}" + f", {row['taken_back']} taken back" * bool(row["taken_back"])
        target = format_seconds(row["target_s"]) if "target_s" in row else ""
        table.add_row(row["case"], row["what"], row["mode"], str(row["seed"]), *times, reached, plans, target)
    people.print(table)
    for row in record["rows"]:
        for text in row["adapted"]:
            people.print(f"{row['case']} ({row['what']}): {text}", markup=False, soft_wrap=True)
    people.print(machine_text(record, torch="torch", python="Python"), soft_wrap=True)
