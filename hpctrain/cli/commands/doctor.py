"""`hpctrain doctor`: what this machine and its cluster allow, and what would harm a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import textwrap

import click
from rich.text import Text

from hpctrain.base.process import SystemRunner
from hpctrain.cli.views.console import Console
from hpctrain.doctor.facts import DoctorFinding, exit_code
from hpctrain.doctor.findings import findings_of
from hpctrain.doctor.inspect import collect_facts
from hpctrain.launch.preflight.prepare import runs_folder

INDENT = 11
"""Columns before a finding's text. They hold the finding's level, of which `problem` is the longest, and spaces."""
WIDTH_MAX = 100
"""Columns of the longest line that `hpctrain doctor` prints on a terminal."""
_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list on stdout and nothing else.")
def doctor_command(as_json: bool) -> None:
    """Say what this machine and its cluster allow, and what would harm a run.

    Checked are Slurm's settings and what each costs a run, partitions with their limits and GPUs, container runtimes,
    torch with CUDA, NCCL and gloo, network interfaces, and the file system of run folders, on which a lock, a rename
    and a link are tried. No job is submitted, and no file is left behind.

    Exit code 3 if something would make a run fail. What is merely absent, such as a container runtime, is reported and
    does not count.
    """
    findings = findings_of(collect_facts(SystemRunner(), os.environ, runs_folder(), shutil.which))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        console = Console()
        for subject, group in itertools.groupby(findings, key=lambda finding: finding.subject):
            console.print(Text(subject, style="bold"))
            for finding in group:
                _print(console, finding)
        console.print(_summary(findings), soft_wrap=not console.is_terminal)
    sys.exit(exit_code(findings))


def _print(console: Console, finding: DoctorFinding) -> None:
    """Print a finding, what it means and what to do. Lines are wrapped on a terminal only; in a pipe, grep finds whole
    lines."""
    width = min(console.width, WIDTH_MAX) - INDENT if console.is_terminal else None
    todo = f"to do: {finding.todo}" if finding.todo else ""
    texts = [text for text in (f"{finding.name}: {finding.value}", finding.words, todo) if text]
    lines = (
        texts
        if width is None
        else [line for text in texts for line in textwrap.wrap(text, width, break_on_hyphens=False)]
    )
    # Text, because rich reads the brackets of a node set in a plain string as markup.
    head = Text.assemble((f"  {finding.level}".ljust(INDENT), _STYLE[finding.level]), lines[0])
    for line in (head, *(Text(" " * INDENT + line) for line in lines[1:])):
        console.print(line, soft_wrap=True)


def _summary(findings: list[DoctorFinding]) -> Text:
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLE}
    bad = [finding.name for finding in findings if finding.level == "problem"]
    if bad:
        return Text(f"{len(bad)} of {len(findings)} would make a run fail: {', '.join(bad)}", style=_STYLE["problem"])
    return Text(f"nothing found that would make a run fail; {counts['note']} of {len(findings)} to know about")
