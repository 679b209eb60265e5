"""`hpctrain probe`: measure nodes, devices and links into a topology file, with a verdict."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.probe_local import probe_local
from hpctrain.probe.view import render

EXIT_CODES = {"go": EXIT_DONE, "warn": EXIT_WARNINGS, "refuse": EXIT_REFUSED}
LOCAL_MOST = 64
_PHASES = {
    "join": "{done} of {planned} nodes are there",
    "links": "links: {done} of {planned} rounds",
    "devices": "devices: {done} of {planned} nodes at work",
}


@click.command()
@click.option(
    "--local", "count", type=click.IntRange(1, LOCAL_MOST), metavar="N", help="N virtual nodes of this machine."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("topology.json"),
    show_default=True,
    help="File to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Also print the topology as JSON on stdout.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Devices to measure.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Orders the rounds.")
@click.pass_context
def command(ctx: click.Context, count: int | None, output: Path, as_json: bool, device: str, seed: int) -> None:
    """Measure nodes, devices and links into a topology file.

    Every pair of nodes measures latency and bandwidth (timed at the receiver) in rounds in which no node is busy
    twice; every device measures matrix products, memory and the cost of a tiny operation.

    \b
    Exit codes: 0 go, 3 go with warnings, 4 refused. The file is written in each case.
    """
    if count is None:
        raise InputError("--local: missing; this version probes virtual nodes of this machine, for example --local 4")
    _check_output(output)
    people = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="hpctrain-probe-") as folder, _progress(Console(stderr=True)) as told:
        topology = probe_local(count, Path(folder), SystemRunner(), SystemClock(), device, seed, told)
    topology.write(output)
    people.print(render(topology))
    people.print(f"wrote {output}", highlight=False)
    if as_json:
        click.echo(json.dumps(topology.to_json(), indent=1))
    ctx.exit(EXIT_CODES[topology.verdict.status])


def _check_output(output: Path) -> None:
    """Say before measuring that the file cannot be written."""
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}; make it first")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"--output {output}: {output.parent} cannot be written; choose another folder")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """One line that changes on a terminal, else one plain line a phase."""
    if console.is_terminal:
        with console.status("starting the nodes") as status:
            yield lambda phase, done, planned: status.update(_PHASES[phase].format(done=done, planned=planned))
        return
    seen: set[str] = set()

    def tell(phase: str, done: int, planned: int) -> None:
        if phase not in seen:
            seen.add(phase)
            console.print(_PHASES[phase].format(done=done, planned=planned), highlight=False)

    yield tell
