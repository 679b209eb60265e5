"""What the commands `probe`, `plan`, `submit` and `cancel` do, as functions, and waiting for a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.api.arguments import (
    AnyPath,
    Progress,
    check_count,
    check_outside_of_jobs,
    folder_of,
    line_reporter,
    overrides_of,
    path_of,
    report_warnings,
    reporter,
)
from hpctrain.api.loaded_run import LoadedRun
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError, WaitTimeoutError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_seconds
from hpctrain.jobs.run_status import WatchedRun
from hpctrain.launch.cancel import cancel_run
from hpctrain.launch.local import check_gpus
from hpctrain.launch.preflight.prepare import RunInputs, with_model_sizes
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.preflight.stale_topology import stale_topology_text
from hpctrain.launch.probe import ProbeJob, ProbeRequest, measure_topology, with_site_defaults
from hpctrain.launch.queueing import check_for_queue, prepare_submission, queue_run, start_in_background, with_site
from hpctrain.planner import PlanRequest, Solver, make_plan
from hpctrain.planner.devices.power import probed_watts
from hpctrain.planner.search.objective import Goal, Objective
from hpctrain.probe.measure.settings import MODES, Mode, default_mode
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import read_run
from hpctrain.records.topology.topology import Topology
from hpctrain.report.status import RunStatus
from hpctrain.slurm.commands import Slurm

DEVICES = ("auto", "cpu", "cuda")
"""Devices that a probe measures."""
_LOOK_S = 1.0
"""Seconds between two looks of `wait` at a run's files."""


def probe(
    *, local: int | None = None, nodes: int | None = None, output: AnyPath = "topology.json", device: str = "auto",
    mode: Mode | None = None, seed: int = 0, prior: AnyPath | None = None, progress: Progress | None = None,
    **slurm: Any,
) -> Topology:  # fmt: skip
    """Measure nodes, devices and links, write the topology to the file `output`, and return it.

    The topology's `verdict.status` is go, warn or refuse. The function returns when the probe has ended, which for a
    job includes the wait in the queue.

    Args:
        local: number of virtual nodes of this machine.
        nodes: number of nodes that a Slurm job asks for; inside an allocation, how many of its nodes are measured. Give
            either `local` or `nodes`.
        device: devices to measure: auto, cpu or cuda.
        mode: health, full or sampled; None: full for few nodes, else sampled.
        seed: seed of the order of the rounds.
        prior: file of a topology that names the switches, for the modes sampled and health of a Slurm job.
        progress: called with a line for each phase.
        slurm: what the job asks Slurm for, as texts: partition, account, qos, time, nodelist, exclude, constraint,
            gpu_type; and gpus_per_node as a number. Without partition, account, qos, exclude or constraint, the value
            is that of site.yaml, else that of a variable such as SBATCH_ACCOUNT. Without time, it is 15 minutes.

    Raises:
        InputError: an argument cannot be used, or the file cannot be written.
        CommandError: there is no Slurm here.
        HpctrainError: the probe failed; the file has what was measured until then.
    """
    if (local is None) == (nodes is None):
        raise InputError("probe: give one of local (virtual nodes of this machine) and nodes (a Slurm job)")
    if local is not None and slurm:
        raise InputError(f"probe: found {', '.join(slurm)} with local; these are for a Slurm job, which nodes asks for")
    allowed = [field.name for field in fields(ProbeJob) if field.name not in ("nodes", "name")]
    if unknown := sorted(slurm.keys() - set(allowed)):
        raise InputError(f"probe: found {unknown[0]}; allowed for the job: {', '.join(allowed)}")
    check_count("probe: local", local)
    check_count("probe: nodes", nodes)
    for name, value, known in (("device", device, DEVICES), ("mode", mode, (None, *MODES))):
        if value not in known:
            raise InputError(f"probe: {name}: found {value!r}; allowed: {', '.join(filter(None, known))}")
    say, seen, runner = reporter(progress), set[str](), SystemRunner()
    where: int | ProbeJob
    if local is not None:
        report_warnings(progress, check_gpus(local, device, os.environ))
        where = local
    else:
        assert nodes is not None, "checked above"
        where, lines = with_site_defaults(ProbeJob(nodes, **slurm), runner)
        line_reporter(progress)(lines)
    request = ProbeRequest(
        device, seed, mode or default_mode(local or nodes or 1), None if prior is None else Path(prior)
    )

    def show(phase: str, done: int, planned: int) -> None:
        if phase not in seen:
            seen.add(phase)
            say(f"probe: {phase}, {done} of {planned}")

    return measure_topology(where, Path(output), runner, SystemClock(), request, show, say)


def plan(
    run_file: AnyPath, topology: AnyPath | Topology, *, settings: Mapping[str, Any] | None = None,
    goal: Goal = "time", watts: Mapping[str, float] | None = None, prices: Mapping[str, float] | None = None,
    max_memory: float | None = None, solver: Solver = "auto", previous: Plan | None = None,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a run on measured nodes; `plan.write(path)` writes it, and `train` and `submit` take the file.

    `plan.predicted.step_time_s["total"]` is the predicted time of a step in seconds, `plan.predicted.bound_s` the
    seconds that no plan on these nodes can beat, by the same cost model. `plan.rejected` lists rejected neighbours with
    the reasons why they were not chosen.

    Args:
        topology: topology of the nodes, or its file. `Topology.read(path).only(names)` leaves nodes out.
        settings: values that replace those of the run file, by key: {"batch.global": 32}.
        goal: what is minimized: time (of a step), robust (its 95th percentile with disturbances), energy (joules a
            token) or cost (price of a token).
        watts: power of a busy device by device type, in watts, for the goal energy. For other types, it is the power
            that the topology has.
        prices: price of one device for an hour, in any currency, by device type, for the goal cost.
        max_memory: largest share of a device's memory that the plan may use, above 0 and at most 1; None: 0.9.
        solver: auto, exact (every plan, on a few devices) or paper.
        previous: plan that this one replaces; state stays in place as far as possible.
        progress: called with each warning about a topology that may be out of date.

    Raises:
        FileError, InputError: a file or an argument is wrong.
        RefusedError: the model fits on no part of the nodes.
        HpctrainError: the process that builds the run's model failed.
    """
    if max_memory is not None and not 0 < max_memory <= 1:
        raise InputError(f"plan: max_memory: found {max_memory}; allowed: above 0, at most 1")
    if solver == "paper" and goal != "time":
        raise InputError("plan: solver paper: it plans for time only; leave goal out")
    run, spec = with_model_sizes(read_run(Path(run_file), overrides_of(settings)), SystemRunner())
    measured = topology if isinstance(topology, Topology) else Topology.read(Path(topology))
    report_warnings(progress, stale_topology_text(measured, None, SystemClock().wall()))
    objective = Objective(
        goal=goal, watts=probed_watts(measured) | dict(watts or {}), prices=prices or {}, usable=max_memory
    )
    return make_plan(run, spec, measured, PlanRequest(solver=solver, objective=objective), previous=previous).stamped()


def submit(
    run_file: AnyPath, *, settings: Mapping[str, Any] | None = None, topology: AnyPath | None = None,
    plan: AnyPath | None = None, site: str | None = None, here: bool = False, progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Submit a run as one job, and return it at once; `wait` waits for its end.

    The job is checked against the cluster first, as by `hpctrain submit`. A run file with `cluster.kind: local` starts
    the run in the background of this machine instead; the run goes on when this process ends.

    Args:
        settings: values that replace those of the run file, by key: {"steps": 1000, "cluster.partition": "gpu"}.
        topology: topology file of the nodes; None: the job probes.
        plan: plan file, obeyed to the letter; None: the job plans.
        site: profile of site.yaml; None: the first that matches this cluster.
        here: start the run in the background of this machine, whatever cluster.kind is.
        progress: called with each line of the checks, such as the chosen partition and when Slurm expects to start.

    Raises:
        FileError, InputError: a file or a setting is wrong, or there is no Slurm here.
        RefusedError: no partition takes the job, the model does not fit, or this process is inside of a job.
        CommandError: sbatch refused the job.
        StorageError: the run folder cannot be written.
        HpctrainError: the process that builds the run's model failed, or the run's image cannot be started.
    """
    say, runner, clock = line_reporter(progress), SystemRunner(), SystemClock()
    slurm = Slurm(runner)
    overrides = (*overrides_of(settings), *(("cluster.kind=local",) if here else ()))
    given, lines = with_site(RunInputs(Path(run_file), overrides, path_of(topology), path_of(plan)), site, slurm)
    with owner_only():
        say(lines)
        prepared = prepare_submission(given, here, slurm, runner, say)
        report_warnings(progress, stale_topology_text(prepared.topology, prepared.nodes or None, clock.wall()))
        if prepared.run.cluster.kind == "local":
            report_warnings(progress, login_node_words(len(prepared.nodes), slurm, os.environ))
            return LoadedRun(start_in_background(prepared, runner, clock, say).folder)
        check_outside_of_jobs("submit")
        prepared, checked = check_for_queue(prepared, slurm, clock, say)
        return LoadedRun(queue_run(prepared, checked, slurm, runner, clock, say).folder)


def wait(run: LoadedRun | AnyPath, timeout_s: float | None = None, *, progress: Progress | None = None) -> RunStatus:
    """Wait until a run does nothing more, through requeues and following jobs, and return its status.

    The `state` of the status is then done, failed or cancelled; or unknown, if the run's files have not changed for a
    minute and no process and no job is known.

    Args:
        run: the run, its folder, its name or a job's id.
        timeout_s: seconds to wait; None: without limit.
        progress: called with a line when the state changes.

    Raises:
        WaitTimeoutError: the run goes on after `timeout_s`; it is also a TimeoutError.
        InputError: there is no such run, or the run folder or a file in it is damaged
            or untrusted (it belongs to another user, or others can write to it).
    """
    clock, say = SystemClock(), reporter(progress)
    deadline = None if timeout_s is None else clock.now() + timeout_s
    watched, state = WatchedRun(folder_of(run), clock), ""
    while True:
        status = watched.look()
        if status.state != state:
            say(f"{status.name}: {status.state}: {status.reason}")
            state = status.state
        if watched.is_over(status):
            return status
        remaining = _LOOK_S if deadline is None else deadline - clock.now()
        if remaining <= 0:
            raise WaitTimeoutError(
                f"{status.name}: it is {status.state} after {format_seconds(timeout_s or 0)} ({status.reason}); wait "
                "again, or stop it with cancel"
            )
        clock.sleep(min(_LOOK_S, remaining))


def cancel(run: LoadedRun | AnyPath, *, at_once: bool = False) -> str:
    """Stop a run for good, and return a sentence that says what was done. Its agents save a checkpoint and stop, then
    its job is cancelled; a waiting job is taken out of the queue.

    Args:
        run: the run, its folder, its name or a job's id.
        at_once: do not wait for a checkpoint; steps since the last one may be lost.

    Raises:
        InputError: there is no such run, or nothing to stop.
        RefusedError: the run's job is on another cluster.
        CommandError: Slurm did not cancel the job.
        StorageError: the run folder cannot be written.
    """
    with owner_only():
        return cancel_run(folder_of(run), at_once, SystemRunner(), SystemClock())
