"""`hpctrain simulate failures`: goodput of a long job by checkpoint interval and kind of recovery."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_seconds
from hpctrain.cli.options.parameters import FiniteNumber
from hpctrain.cli.views.console import table_console
from hpctrain.planner.simulate.goodput import (
    DEFAULT_RECOVERY_S,
    RECOVERY_MODES,
    FailureModel,
    Goodput,
    RecoveryMode,
    daly_goodput,
    daly_interval,
    simulate_goodput,
)

WIDTH = 100
"""Columns of the table if it is not printed on a terminal."""
INTERVALS_MIN = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0)
MOST_FAILURES = 100_000
HOUR, DAY = 3600.0, 86400.0


def recover_option(purpose: str = "") -> Callable[..., Any]:
    """Return the option `--recover SECONDS`; `purpose` says what it is for."""
    return click.option(
        "--recover",
        type=FiniteNumber(0),
        default=DEFAULT_RECOVERY_S,
        metavar="SECONDS",
        help=f"From a failure to the next step, in place{purpose} (default: 5 s until a silent node is missed, and "
        "what four local nodes took).",
    )


@click.command("failures")
@click.option("--gpus", type=click.IntRange(1), default=10_000, help="GPUs that train.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, help="A node fails as a whole.")
@click.option(
    "--node-mtbf",
    type=FiniteNumber(0, min_open=True),
    default=6300.0,
    metavar="HOURS",
    help="Mean time between failures of one node. Default: 419 unexpected interruptions in "
    "54 days on 2,048 nodes of 8 GPUs (Llama 3, 2024).",
)
@click.option("--days", type=FiniteNumber(0, 3650, min_open=True), default=30.0, help="Length of the job.")
@click.option(
    "--interval",
    "intervals",
    multiple=True,
    type=FiniteNumber(0, min_open=True),
    metavar="MINUTES",
    help="Training between two checkpoints; give it again for more. Default: 1, 5, 15, 30, 60, 120.",
)
@click.option(
    "--stall",
    type=FiniteNumber(0),
    default=0.046,
    metavar="SECONDS",
    help="How long training stands still for a checkpoint (default: 220 MB a rank, docs/results/runtime.md).",
)
@click.option(
    "--save",
    type=FiniteNumber(0),
    default=0.774,
    metavar="SECONDS",
    help="How long until a checkpoint can be used (default: as for --stall).",
)
@recover_option()
@click.option(
    "--queue-wait",
    type=FiniteNumber(0),
    metavar="SECONDS",
    help="What requeueing adds to that. Without it, requeueing is left out: no default would be true.",
)
@click.option("--repair", type=FiniteNumber(0), metavar="HOURS", help="Until a failed node is back. Default: never.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Idle nodes beside the GPUs.")
@click.option("--trials", type=click.IntRange(1, 100_000), default=100, help="Jobs simulated.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Decides which nodes fail when.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
def failures(
    gpus: int, gpus_per_node: int, node_mtbf: float, days: float, intervals: tuple[float, ...], stall: float,
    save: float, recover: float, queue_wait: float | None, repair: float | None, spares: int, trials: int, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """A month of failures: predict the goodput, the share of the time that becomes training which is not lost again.

    Nodes fail independently at a constant rate, also while the job recovers. Training speed is proportional to the
    number of nodes that the job has. With recovery in place, the job continues on the nodes that are left; a repaired
    node joins at the next failure. For requeueing with all nodes back, the expected value by Daly's formula is printed
    beside the simulation.
    """
    cluster = FailureModel(
        nodes=math.ceil(gpus / gpus_per_node),
        node_mtbf_s=node_mtbf * HOUR,
        stall_s=stall,
        save_s=save,
        recover_s=recover,
        queue_s=math.inf if queue_wait is None else queue_wait,
        repair_s=math.inf if repair is None else repair * HOUR,
        spares=spares,
    )
    intervals_s = sorted({minutes * 60 for minutes in intervals or INTERVALS_MIN})
    if intervals_s[0] + stall < save:
        raise InputError(
            f"--interval: found {intervals_s[0] / 60:g} minutes, shorter than a checkpoint takes ({save:g} s by --save)"
        )
    failures_expected = days * DAY * cluster.nodes / cluster.node_mtbf_s
    if failures_expected > MOST_FAILURES:
        raise InputError(
            f"--node-mtbf: found {node_mtbf:g} hours, {failures_expected:.3g} failures in the job; allowed: up to "
            f"{MOST_FAILURES:g}, with more nothing would be trained"
        )
    modes = [
        mode
        for mode in RECOVERY_MODES
        if (mode != "requeue" or queue_wait is not None) and (mode != "spares" or spares)
    ]
    results = [
        result for mode in modes for result in simulate_goodput(cluster, mode, intervals_s, days * DAY, trials, seed)
    ]
    people = table_console(as_json, WIDTH)
    people.print(_table(cluster, modes, results))
    text = f"{cluster.nodes} nodes, a failure every {format_seconds(cluster.node_mtbf_s / cluster.nodes)}"
    if stall:
        text += f"; Young and Daly would save every {format_seconds(daly_interval(cluster))}"
    people.print(f"{text}.", soft_wrap=True)
    if queue_wait is None:
        people.print("Requeueing is left out: give --queue-wait SECONDS. A job without nodes ends.", soft_wrap=True)
    if as_json:
        rows = [asdict(result) for result in results]
        click.echo(json.dumps({"rows": rows, "daly_interval_s": daly_interval(cluster), "seed": seed}, indent=1))


def _table(cluster: FailureModel, modes: list[RecoveryMode], results: list[Goodput]) -> Table:
    words = {"requeue": "requeue", "in_place": "in place", "spares": f"{cluster.spares} spares"}
    table = Table("checkpoint every", title="Goodput: mean, and what 95 of 100 jobs exceed")
    for mode in modes:
        table.add_column(words[mode], justify="right")
        if mode == "requeue":
            table.add_column("expected (Daly)", justify="right")
    for interval_s in dict.fromkeys(result.interval_s for result in results):
        cells = []
        for mode in modes:
            result = next(result for result in results if (result.interval_s, result.mode) == (interval_s, mode))
            cells.append(f"{result.mean:.1%}, {result.p05:.1%}")
            if mode == "requeue":
                cells.append(f"{daly_goodput(cluster, interval_s):.1%}")
        table.add_row(format_seconds(interval_s), *cells)
    return table
