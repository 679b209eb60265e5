"""`hpctrain doctor`: what this machine and its cluster allow, and what would bite."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable

import click
from rich.table import Table
from rich.text import Text

from hpctrain.base.process import SystemRunner
from hpctrain.cli.console import Console
from hpctrain.doctor.finding import Finding, exit_code
from hpctrain.doctor.findings import findings_of
from hpctrain.doctor.gather import gather
from hpctrain.launch.training import runs_folder

_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list on stdout and nothing else.")
def command(as_json: bool) -> None:
    """Say what this machine and its cluster allow, and what would bite a run.

    Slurm's settings and what each costs a run, partitions with their limits and GPUs, container runtimes, torch with
    CUDA, NCCL and gloo, network interfaces, and the file system of run folders, where a lock, a rename and a link are
    tried for real. Nothing is submitted, and nothing stays behind.

    Exit code 3 where something would make a run fail; a part that is merely absent is told and does not count.
    """
    findings = findings_of(gather(SystemRunner(), os.environ, runs_folder(), shutil.which))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        console = Console()
        for subject, group in itertools.groupby(findings, key=lambda finding: finding.subject):
            console.print(_table(subject, group))
        console.print(_summary(findings))
    sys.exit(exit_code(findings))


def _table(subject: str, group: Iterable[Finding]) -> Table:
    # Text, as in a plain string rich would take the brackets of a node set for markup.
    table = Table(title=Text(subject, style="bold"), title_justify="left", box=None, show_header=False, expand=True)
    table.add_column(width=7)
    for share in (2, 3, 5):
        table.add_column(ratio=share, overflow="fold")
    for finding in group:
        words = "; to do: ".join(filter(None, (finding.words, finding.todo)))
        level = Text(finding.level, style=_STYLE[finding.level])
        table.add_row(level, Text(finding.name), Text(finding.value), Text(words))
    return table


def _summary(findings: list[Finding]) -> Text:
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLE}
    bad = [finding.name for finding in findings if finding.level == "problem"]
    if bad:
        return Text(f"{len(bad)} of {len(findings)} would make a run fail: {', '.join(bad)}", style=_STYLE["problem"])
    return Text(f"nothing found that would make a run fail; {counts['note']} of {len(findings)} to know about")
