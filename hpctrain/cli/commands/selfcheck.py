"""`hpctrain selfcheck`: run every path of the devices and of the training code once, and say which of them work."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_FAILED, EXIT_WARNINGS, HpctrainError, InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say
from hpctrain.cli.options.parameters import FILE, PATH
from hpctrain.cli.options.slurm_options import SlurmOptions, slurm_options
from hpctrain.cli.views.console import table_console
from hpctrain.launch.preflight.queue_checks import examine_container
from hpctrain.launch.probe import ProbeRequest
from hpctrain.records.history.selfcheck import SUMMARY_CHARS, PathResult, PathVerdict, SelfcheckReport
from hpctrain.records.run.run import Container
from hpctrain.selfcheck.job import selfcheck_job
from hpctrain.selfcheck.report import check_here

PIPE_WIDTH = 200
_STYLE: dict[PathVerdict, str] = {"ok": "green", "slow": "yellow", "failed": "bold red", "left out": "dim"}


@click.command()
@click.option("--local", "local", is_flag=True, help="Check this machine. The default, unless -N is given.")
@slurm_options
@click.option("--only", multiple=True, metavar="TEXT", help="Run only paths with TEXT in their name; repeatable.")
@click.option("--image", type=PATH, help="Also start this image as a run would, with --nv where GPUs are.")
@click.option("-o", "--output", type=FILE, help="File for the whole report, to attach to a report of a bug.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout and nothing else.")
def selfcheck_command(
    local: bool, only: tuple[str, ...], image: Path | None, output: Path | None, as_json: bool, **slurm: Any
) -> None:
    """Run every path once, and print a table: path, seconds, figure, what was expected, verdict.

    Checked are the devices' figures, copies, attention kernels, compression, NCCL and gloo, small plans (ZeRO 0 to 3,
    pipeline, tensor) against one process, bf16 and fp16, compiled blocks, a checkpoint beside a step, and a run that
    loses a worker. What a machine does not have is left out by name. A path that fails does not stop the others.

    \b
    Exit codes: 0 all is well, 1 a path failed, 3 a path is slow.
    """
    click.get_current_context().with_resource(owner_only())
    runner = SystemRunner()
    options = SlurmOptions(**slurm)
    if local and options.names_nodes:
        raise InputError("give one of --local (this machine) and -N N (a Slurm job)")
    if not options.names_nodes:
        options.check_given_with_nodes()
    if image is not None and not image.exists():
        raise InputError(f"--image: found no file {image}; build one with `hpctrain image build -o {image}`")
    if not options.names_nodes:
        report = check_here(lambda row: None if as_json else click.echo(f"{row.verdict}: {row.path}", err=True), only)
    else:
        with tempfile.TemporaryDirectory(prefix=".hpctrain-selfcheck-", dir=".") as folder:
            job, lines = options.node_job("hpctrain-selfcheck", runner)
            say(lines, err=True)
            report = selfcheck_job(job, Path(folder), ProbeRequest(), runner, SystemClock(), only)
    if image is not None or not only:
        report = report.model_copy(update={"paths": [*report.paths, _image(image)]})
    if output is not None:
        report.write(output)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        _print(report)
        if output is not None:
            click.echo(f"wrote {output}")
    verdicts = {path.verdict for path in report.paths}
    sys.exit(EXIT_FAILED if "failed" in verdicts else EXIT_WARNINGS if "slow" in verdicts else 0)


def _image(image: Path | None) -> PathResult:
    """Check that the container image starts; return its row of the table. The row's verdict is 'left out' if `image`
    is None."""
    name = "image"
    if image is None:
        return PathResult(path=name, verdict="left out", figure="no --image was given", seconds=0.0)
    try:
        findings = examine_container(Container(image=str(image.resolve())), os.environ)
    except HpctrainError as error:
        return PathResult(path=name, verdict="failed", figure=str(error)[:SUMMARY_CHARS], seconds=0.0)
    bad = [finding for finding in findings if finding.level == "problem"]
    figure = "; ".join(f"{item.name}: {item.value}: {item.words}" for item in bad)[:SUMMARY_CHARS]
    return PathResult(
        path=name, verdict="failed" if bad else "ok", figure=figure or f"{len(findings)} checks", expected="no problem",
        next_step=f"`hpctrain image check {image}`" if bad else "", seconds=0.0,
    )  # fmt: skip


def _print(report: SelfcheckReport) -> None:
    console = table_console(pipe_width=PIPE_WIDTH)
    several = len(report.machines) > 1
    table = Table(box=None, pad_edge=False)
    for title in (["node"] if several else []) + ["path", "ran"]:
        table.add_column(title, no_wrap=True)
    table.add_column("figure", overflow="fold", ratio=3)
    table.add_column("expected", overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    for row in report.paths:
        ran = "no" if row.verdict == "left out" else f"{row.seconds:.1f} s" if row.seconds else "yes"
        figure = f"{row.figure}\n→ {row.next_step}" if row.next_step else row.figure
        cells = ([row.node] if several else []) + [row.path, ran, figure, row.expected]
        table.add_row(*map(Text, cells), Text(row.verdict, style=_STYLE[row.verdict]))
    console.print(table)
    counts = Counter(row.verdict for row in report.paths)
    console.print(Text(", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLE if counts[verdict])))
