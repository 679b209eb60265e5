"""`hpctrain submit`: start a run as one Slurm job, or as a background process of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, submission, warn
from hpctrain.cli.commands.resubmit import become_job, begin_own_job, earlier_run, own_job_option
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.options.parameters import PATH, set_option
from hpctrain.cli.options.slurm_options import SlurmOptions, slurm_options
from hpctrain.cli.options.starting import parse_seeds, profile_option, seeds_option, with_profile, with_seed
from hpctrain.jobs.bad_nodes import record_excluded_nodes
from hpctrain.jobs.dependencies import with_dependencies
from hpctrain.jobs.partition_checks import nodes_of_allocation
from hpctrain.launch.local import check_gpus
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, fewest_nodes, make_folder, prepare, runs_folder
from hpctrain.launch.preflight.queue_checks import check_provisional
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.queueing import (
    check_for_queue,
    prepare_submission,
    queue_run,
    script_to_be,
    start_in_background,
    with_site,
)
from hpctrain.launch.slurm_job.job_script import check_is_slurm, run_in_allocation
from hpctrain.launch.slurm_job.queue import CheckedRun, wait_for_job
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `hpctrain submit`: check only, wait for the end of the run, print JSON."""

    dry_run: bool
    wait: bool
    as_json: bool

    def say(self, lines: Iterable[str]) -> None:
        """Print lines for a person: on stdout, or on stderr with --json."""
        say(lines, self.as_json)


@click.command()
@click.argument("run_file", type=PATH, metavar="RUN.YAML")
@slurm_options
@click.option("--topology", type=PATH, help="Topology file of the nodes. Default: probe.")
@click.option("--plan", type=PATH, help="Plan file, obeyed to the letter. Default: plan.")
@set_option
@click.option("--site", metavar="NAME", help="Profile of site.yaml. Default: the first one that matches this place.")
@seeds_option
@profile_option
@click.option(
    "--local", is_flag=True, help="Start the run in the background of this machine, whatever cluster.kind is."
)
@click.option("--dry-run", is_flag=True, help="Check everything and show the job script; submit nothing.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended; its exit code comes back.")
@own_job_option
@click.option("--json", "as_json", is_flag=True, help="Print {name, folder, job_id} on stdout; a dry run, its script.")
def submit_command(
    run_file: Path, topology: Path | None, plan: Path | None, overrides: tuple[str, ...], site: str | None,
    seeds: str | None, profile: int | None, local: bool, dry_run: bool, wait: bool, own_job: bool, as_json: bool,
    **sbatch: Any,
) -> None:  # fmt: skip
    """Submit RUN.YAML as one job: probe if needed, plan, train, requeue.

    The command returns at once. First it checks the job against the cluster, chooses the partition that fits best if
    you name none, and asks Slurm when the job would start. In the job, each attempt measures its nodes, plans for them
    and trains. After a lost node, a preemption or the time limit, the job is requeued and continues from its last
    checkpoint. Inside an existing allocation (salloc) the run starts immediately. With --own-job, as in
    slurm/train.sbatch, your batch job becomes the run's job, and continues the run when it is requeued.

    Slurm's options (-p to --gpus-per-node) mean what they mean to sbatch. They count before the run file, where the
    same things have keys in `cluster`; -J is the run's name.

    With --seeds, each seed is a run of its own, NAME-seedN; --json then prints a list.
    """
    click.get_current_context().with_resource(owner_only())
    options = SlurmOptions(**sbatch)
    here = ("cluster.kind=local",) if local else ()
    overrides = (*with_profile(overrides, profile), *options.overrides(), *here)
    given = RunInputs(run_file, overrides, topology, plan)
    chosen = parse_seeds(seeds) if seeds is not None else []
    asked = SubmitOptions(dry_run, wait, as_json)
    if own_job:
        if dry_run or wait or as_json or chosen or local:
            useless = "--dry-run, --wait, --json, --seeds and --local"
            raise InputError(f"--own-job: the job turns into the run; leave out {useless}")
        options.check_not_given("--own-job", but=["job_name"])
        _submit_as_own_job(given, site)
    slurm = Slurm(SystemRunner())
    given, site_lines = with_site(given, site, slurm)
    given = replace(given, overrides=(*given.overrides, *options.gpu_overrides(given.run(), slurm, os.environ)))
    queued = given.run().cluster.kind == "slurm"
    if chosen and (wait or not queued or _is_inside()):
        raise InputError("--seeds: only for jobs that are queued: cluster.kind slurm, outside of salloc, no --wait")
    asked.say(site_lines)
    prepared = prepare_submission(given, local, slurm, SystemRunner(), asked.say)
    options.check_are_used(prepared.run)
    warn_if_stale(prepared.topology, prepared.nodes or None)
    if not queued:
        warn(login_node_words(fewest_nodes(prepared.run), slurm, os.environ))
        _submit_here(prepared, asked)
    elif _is_inside():
        say(options.unused_in_allocation(), as_json)
        _submit_in_allocation(prepared, asked)
    else:
        _submit_to_slurm(prepared, slurm, chosen, asked)


def _is_inside() -> bool:
    """Whether this process runs in an existing Slurm allocation."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def _submit_to_slurm(prepared: PreparedRun, slurm: Slurm, seeds: list[int], asked: SubmitOptions) -> None:
    if seeds:
        asked.say([f"{len(seeds)} runs, one for each seed; what follows is for each of them"])
    prepared, checked = check_for_queue(prepared, slurm, SystemClock(), asked.say)
    if asked.dry_run:
        script = script_to_be(checked.asked)
        _would(prepared, asked.as_json, script, script=script)
        return
    answers: list[dict[str, str]] = []
    try:
        for seed in seeds or (None,):
            answers.append(_queue_one(prepared, checked, slurm, seed, asked))
    finally:
        # Submitted jobs are printed even after an error: otherwise nobody would know their ids.
        if asked.as_json and answers:
            click.echo(json.dumps(answers if seeds else answers[0]))
    if asked.wait:
        folder, job_id = Path(answers[0]["folder"]), answers[0]["job_id"]
        sys.exit(wait_for_job(folder, job_id, slurm, SystemClock(), lambda text: asked.say([text])))


def _queue_one(
    prepared: PreparedRun, checked: CheckedRun, slurm: Slurm, seed: int | None, asked: SubmitOptions
) -> dict[str, str]:
    """Make the folder of one run and submit the run; return the object that --json prints: {name, folder, job_id}.

    Args:
        checked: the run as the checks of the queue changed it.
        seed: the run's seed, which also ends its name; None: seed and name of the run file.
    """
    if seed is not None:
        prepared = replace(prepared, run=with_seed(prepared.run, seed))
        checked = replace(checked, asked=with_seed(checked.asked, seed))
    started = queue_run(prepared, checked, slurm, SystemRunner(), SystemClock(), asked.say)
    if not asked.as_json:
        _tell(started.folder, started.job_id, as_json=False)
    return submission(started.folder, started.job_id)


def _submit_in_allocation(prepared: PreparedRun, asked: SubmitOptions) -> None:
    prepared = _not_waiting(prepared, "the allocation is there already", asked.as_json)
    say(check_provisional(prepared, runs_folder(), nodes_of_allocation(os.environ)), asked.as_json)
    if asked.dry_run:
        script = script_to_be(prepared.run)
        _would(prepared, asked.as_json, script, script=script)
        return
    job_id = os.environ["SLURM_JOB_ID"]
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    warn(add_to_history("submit", folder.path, job_id, Slurm(SystemRunner())))
    _tell(folder.path, job_id, asked.as_json)
    _run_here(folder, prepared, job_id)


def _not_waiting(prepared: PreparedRun, why: str, as_json: bool) -> PreparedRun:
    if not prepared.run.cluster.after:
        return prepared
    say([f"cluster.after: not waited for, as {why}"], as_json)
    return replace(prepared, run=with_dependencies(prepared.run, []))


def _submit_as_own_job(given: RunInputs, site: str | None) -> NoReturn:
    """Make the batch job of this process the job of a new run; if Slurm requeued the job, continue its run. Does not
    return.

    Args:
        site: name of the profile in site.yaml; None: the first that matches this cluster.
    """
    job = begin_own_job()
    before = earlier_run(job)
    if before is not None:
        become_job(before, job)
    given, _ = with_site(given, site, Slurm(SystemRunner()))
    prepared = prepare(given, SystemRunner(), queued=True)
    warn_if_stale(prepared.topology)
    check_is_slurm(prepared.run)
    prepared = _not_waiting(prepared, "this job runs already", True)
    say(check_provisional(prepared, runs_folder(), nodes_of_allocation(os.environ)), True)
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    record_excluded_nodes(folder.path, prepared.topology, SystemClock().wall(), prepared.run.recovery.exclude_hours)
    become_job(folder.path, job, prepared.run)


def _run_here(folder: RunFolder, prepared: PreparedRun, job_id: str) -> NoReturn:
    """Run the job script within this Slurm allocation, and exit with its code; does not return."""
    code = run_in_allocation(folder, prepared.run, job_id, SystemRunner(), lambda text: warn([text]))
    newest = folder.attempts()[-1:] or [{"reason": "the job script did not get to its run"}]
    warn([newest[0].get("reason", "the job script was killed")])
    sys.exit(code)


def _submit_here(prepared: PreparedRun, asked: SubmitOptions) -> None:
    if asked.wait:
        raise InputError("--wait: to watch a local run to its end, start it with `hpctrain train` instead")
    if asked.dry_run:
        count = fewest_nodes(prepared.run)
        asked.say(check_gpus(count, prepared.run.cluster.device, os.environ))
        text = f"would start {count} virtual nodes of this machine in the background"
        _would(prepared, asked.as_json, text, nodes=count)
        return
    started = start_in_background(prepared, SystemRunner(), SystemClock(), asked.say)
    _tell(started.folder, started.job_id, asked.as_json)


def _would(prepared: PreparedRun, as_json: bool, text: str, **more: object) -> None:
    """Print the result of a dry run.

    Args:
        text: printed for a person.
        more: printed with `as_json`, beside the run's name and a folder and job id of null.
    """
    nothing = {"name": prepared.run.name, "folder": None, "job_id": None}
    click.echo(json.dumps({**nothing, **more}) if as_json else text)


def _tell(folder: Path, job_id: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(submission(folder, job_id)))
        return
    click.echo(f"job {job_id}, run folder {folder}")
    name = folder.name
    click.echo(f"watch: hpctrain watch {name}\nlogs:  hpctrain logs -f {name}")
    click.echo(f"look:  hpctrain status {name}\nstop:  hpctrain cancel {name}")
