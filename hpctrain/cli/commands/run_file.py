"""Commands for files: `init` writes a run file, `schema` prints the JSON Schema of a kind of file."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import psutil

from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, warn
from hpctrain.cli.commands.data import summary
from hpctrain.cli.options.completion import complete_presets
from hpctrain.cli.options.parameters import PATH
from hpctrain.cli.options.slurm_options import ClusterValue
from hpctrain.cli.views.console import phases
from hpctrain.lab.spec import LabSpec
from hpctrain.launch.preflight.site import place_defaults
from hpctrain.launch.slurm_job.starter_cluster import SeenCluster, choose_cluster, see_cluster
from hpctrain.launch.starter import Starter, WrittenStarter, check_starter, write_starter
from hpctrain.records.corpus import CorpusIndex, Recipe
from hpctrain.records.format.document import Document
from hpctrain.records.history.adapted_plan import AdaptedPlan
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.ledger import BadNode, Successor
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.history.node_log import NodeRow
from hpctrain.records.history.past_runs import PastRun
from hpctrain.records.history.provenance import NodeEnvironment, RunProvenance
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.records.history.selfcheck import SelfcheckReport
from hpctrain.records.history.step_spans import StepSpans
from hpctrain.records.history.sweep import Sweep
from hpctrain.records.history.tracked import Tracked
from hpctrain.records.history.witness import WitnessEntry
from hpctrain.records.model.families import PRESETS
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.cluster import Site
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run_file", metavar="[RUN.YAML]", default="run.yaml", type=PATH)
@click.option("--yes", is_flag=True, help="Ask nothing, and prepare a corpus from text found on this machine.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--name", help="Name of the run.")
@click.option("--preset", metavar="NAME", shell_complete=complete_presets, help=f"Model: {', '.join(PRESETS)}.")
@click.option("--steps", type=int, help="Optimizer steps.")
@click.option("--local", is_flag=True, help="Write a run of this machine, even on a Slurm cluster.")
@click.option(
    "-p",
    "--partition",
    type=ClusterValue("partition"),
    metavar="NAME",
    help="Slurm partition. Default: the one that fits best.",
)
@click.option(
    "-A", "--account", type=ClusterValue("account"), metavar="NAME", help="Slurm account to which the job is charged."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written on stdout, as JSON.")
def init_command(
    run_file: Path, yes: bool, force: bool, name: str | None, preset: str | None, steps: int | None, local: bool,
    partition: str | None, account: str | None, as_json: bool
) -> None:  # fmt: skip
    """Write a commented run file fitted to this machine, or to its Slurm cluster.

    On a machine of a Slurm cluster, the run is a job: partition, account, GPU type, number of nodes, time limit and
    precision are chosen by what Slurm says, and the comment beside each gives the reason.

    With --yes you can train with the file as it is: a corpus is prepared beside it, in data/, from text found on this
    machine. On a terminal, the command asks for name, model, steps and, if you have several, the account, and whether
    to prepare that corpus.
    """
    given: dict[str, Any] = {"name": name, "preset": preset, "steps": steps}
    starter = dataclasses.replace(Starter(), **{key: value for key, value in given.items() if value is not None})
    check_starter(run_file, starter, force)
    chosen = {key: value for key, value in (("partition", partition), ("account", account)) if value is not None}
    slurm = Slurm(SystemRunner())
    seen = None if local else see_cluster(slurm, psutil.Process().username())
    defaults = place_defaults(slurm, os.environ) if seen is not None else {}
    if defaults.get("kind", ("", ""))[0] == "local":
        seen = None
    if chosen and seen is None:
        raise InputError(f"--{next(iter(chosen))}: only for a Slurm cluster; this run is of this machine")
    with_data = yes
    if not yes and sys.stdin.isatty():
        starter = _ask(starter, given)
        if seen is not None and "account" not in {**chosen, **defaults}:
            chosen.update(_ask_account(seen))
        with_data = click.confirm("Prepare a corpus from text found on this machine?", default=True, err=True)
    if seen is not None:
        starter = dataclasses.replace(starter, cluster=choose_cluster(starter.run, seen, defaults, chosen))
    with phases() as progress:
        started = write_starter(run_file, starter, with_data=with_data, force=force, progress=progress)
    if starter.cluster is not None:
        warn(starter.cluster.warnings)
    if as_json:
        data = str(started.data) if started.index else None
        kind = started.run.cluster.kind
        click.echo(json.dumps({"run_file": str(run_file), "data": data, "name": started.run.name, "kind": kind}))
    say(_summary_lines(started, starter), as_json)


def _ask(starter: Starter, given: dict[str, Any]) -> Starter:
    """Ask the person for the values that the command line leaves open; return the starter with them.

    Args:
        given: values of the options --name, --preset and --steps by name; None: the option was not given.
    """
    questions = {
        "name": ("Name of the run", None),
        "preset": ("Model", click.Choice(list(PRESETS))),
        "steps": ("Optimizer steps", click.IntRange(min=1)),
    }
    answers = {
        key: click.prompt(text, default=getattr(starter, key), type=kind, err=True)
        for key, (text, kind) in questions.items()
        if given[key] is None
    }
    return dataclasses.replace(starter, **answers)


def _ask_account(seen: SeenCluster) -> dict[str, str]:
    """Return {"account": the one that the person chooses}; {}, without a question, if Slurm knows fewer than two
    accounts of the person.
    """
    names = seen.accounts.names if seen.accounts else ()
    if len(names) < 2:
        return {}
    return {"account": click.prompt("Slurm account", default=names[0], type=click.Choice(names), err=True)}


def _summary_lines(started: WrittenStarter, starter: Starter) -> list[str]:
    path = started.run_file
    begin = f"hpctrain train {path} --local {starter.nodes}" if starter.cluster is None else f"hpctrain submit {path}"
    where = [] if starter.cluster is None else [f"for this cluster: {starter.cluster.words}"]
    if started.index is None:
        return [
            f"wrote {path}", *where, f"next: hpctrain data prepare TEXT... -o {started.data}", f"then: {begin}",
        ]  # fmt: skip
    return [started.text_source, *summary(started.data, started.index), f"wrote {path}", *where, f"next: {begin}"]


_WRITTEN_BY_YOU: tuple[type[Document], ...] = (Run, Site, Recipe, LabSpec)
_WRITTEN_BY_HPCTRAIN: tuple[type[Document], ...] = (
    Topology, Plan, MetricRow, RankRow, NodeRow, Event, Generation, WitnessEntry, AdaptedPlan, Successor,
    BadNode, RunProvenance, NodeEnvironment, Sweep, Manifest, CorpusIndex, PastRun, Tracked, SelfcheckReport, StepSpans,
)  # fmt: skip
KINDS = {model.schema_kind: model for model in (*_WRITTEN_BY_YOU, *_WRITTEN_BY_HPCTRAIN)}
"""Kind of a file that people write or read -> its model."""


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
def schema_command(kind: str) -> None:
    """Print the JSON Schema of a kind of file: every key, its meaning, type and default. For a file of lines (.jsonl),
    the schema is that of a line.

    An editor can check and complete run.yaml by the schema: save the schema as run.schema.json beside run.yaml, and
    begin run.yaml with the line `# yaml-language-server: $schema=run.schema.json`.
    """
    schema = KINDS[kind].model_json_schema(by_alias=True)
    click.echo(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1))
