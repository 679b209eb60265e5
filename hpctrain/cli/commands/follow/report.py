"""`hpctrain report RUN`: write a run's report as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.owned_files import owner_only
from hpctrain.cli.options.run_and_paths import FILE, RUN
from hpctrain.report.render import write_report


@click.command("report")
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("-o", "--output", type=FILE, help="Default: report.html in RUN.")
def command(folder: Path, output: Path | None) -> None:
    """Write a run's report.html.

    The report is one file that needs no network and no other file: loss, throughput, stage times, bytes sent, the
    measured network, the plan compared with the measurements, faults and recoveries. A run in progress has a report
    too.

    RUN is a run folder, or a run's name, which is looked up in ./runs, then in $HPCTRAIN_RUNS; of several folders with
    that name the newest counts.
    """
    if output is None:
        # In the run folder only the owner may read the report; a report elsewhere is made to be shown.
        click.get_current_context().with_resource(owner_only())
    target = output or folder / "report.html"
    write_report(folder, target, SystemClock().wall())
    click.echo(str(target))
