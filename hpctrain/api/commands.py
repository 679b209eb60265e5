"""What the commands `probe`, `plan`, `submit`, `train` and `cancel` do, as functions, and waiting for a run.

Lines for a person go to the function `progress`; without one, they go to the logger `hpctrain`: warnings as warnings,
all else as info.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.api.loaded_run import LoadedRun, load_run
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, HpctrainError, InputError, RefusedError, WaitTimeoutError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_seconds
from hpctrain.hf.folder import dropout_warning
from hpctrain.jobs.run_status import WatchedRun
from hpctrain.launch import local_run
from hpctrain.launch.cancel import cancel_run
from hpctrain.launch.local import check_gpus
from hpctrain.launch.local_run import LocalJob
from hpctrain.launch.preflight.prepare import RunInputs, prepare, runs_folder, with_model_sizes
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.preflight.stale_topology import stale_topology_text
from hpctrain.launch.probe import ProbeJob, ProbeRequest, measure_topology
from hpctrain.launch.queueing import check_for_queue, prepare_submission, queue_run, start_in_background, with_site
from hpctrain.planner import PlanRequest, Solver, make_plan
from hpctrain.planner.search.objective import Goal, Objective
from hpctrain.probe.measure.settings import Mode, default_mode
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run, read_run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.event_text import describe_event
from hpctrain.report.live_run import follow
from hpctrain.report.status import RunStatus
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.file_system import checkpoint_space_warning
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm

AnyPath = str | os.PathLike[str]
Progress = Callable[[str], None]
"""Function that is called with each line for a person."""

_log = logging.getLogger("hpctrain")
_LOOK_S = 1.0
"""Seconds between two looks of `wait` at a run's files."""


def probe(
    *, local: int | None = None, nodes: int | None = None, output: AnyPath = "topology.json", device: str = "auto",
    mode: Mode | None = None, seed: int = 0, prior: AnyPath | None = None, progress: Progress | None = None,
    **slurm: Any,
) -> Topology:  # fmt: skip
    """Measure nodes, devices and links, write the topology to the file `output`, and return it.

    Its `verdict.status` is go, warn or refuse. The function returns when the probe has ended, which for a job includes
    the wait in the queue.

    Args:
        local: number of virtual nodes of this machine.
        nodes: number of nodes of a Slurm job; inside an allocation, of its nodes. Give either `local` or `nodes`.
        device: devices to measure: auto, cpu or cuda.
        mode: health, full or sampled; None: full for few nodes, else sampled.
        seed: seed of the order of the rounds.
        prior: file of a topology that names the switches, for the mode sampled.
        progress: called with a line for each phase.
        slurm: what the job asks Slurm for, as texts: partition, account, qos, time, nodelist; gpus_per_node as a
            number.

    Raises:
        InputError: an argument cannot be used, or the file cannot be written.
        CommandError: there is no Slurm here.
        HpctrainError: the probe failed; the file has what was measured until then.
    """
    if (local is None) == (nodes is None):
        raise InputError("probe: give one of local (virtual nodes of this machine) and nodes (a Slurm job)")
    if local is not None and slurm:
        raise InputError(f"probe: found {', '.join(slurm)} with local; these are for a Slurm job, which nodes asks for")
    allowed = ("partition", "account", "qos", "time", "nodelist", "gpus_per_node")
    if unknown := sorted(slurm.keys() - set(allowed)):
        raise InputError(f"probe: found {unknown[0]}; allowed for the job: {', '.join(allowed)}")
    where: int | ProbeJob = local if local is not None else ProbeJob(nodes or 1, **slurm)
    request = ProbeRequest(
        device, seed, mode or default_mode(local or nodes or 1), None if prior is None else Path(prior)
    )
    if local is not None:
        _warn(progress, check_gpus(local, device, os.environ))
    say, seen = progress or _log.info, set[str]()

    def show(phase: str, done: int, planned: int) -> None:
        if phase not in seen:
            seen.add(phase)
            say(f"probe: {phase}, {done} of {planned}")

    return measure_topology(where, Path(output), SystemRunner(), SystemClock(), request, show, say)


def plan(
    run_file: AnyPath, topology: AnyPath | Topology, *, settings: Mapping[str, Any] | None = None,
    goal: Goal = "time", watts: Mapping[str, float] | None = None, prices: Mapping[str, float] | None = None,
    max_memory: float | None = None, solver: Solver = "auto", previous: Plan | None = None,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a run on measured nodes; `plan.write(path)` writes it, and `train` and `submit` take the file.

    `plan.predicted.step_time_s["total"]` is the predicted time of a step in seconds, `plan.predicted.bound_s` the time
    that no plan can beat, and `plan.rejected` lists neighbours with the reasons why they lost.

    Args:
        topology: topology of the nodes, or its file. `Topology.read(path).only(names)` leaves nodes out.
        settings: values that replace those of the run file, by key: {"batch.global": 32}.
        goal: what is minimized: time (of a step), robust (its 95th percentile with disturbances), energy (joules a
            token) or cost (price of a token).
        watts: power of a busy device by device type, in watts, for the goal energy.
        prices: price of a device by device type for an hour, for the goal cost.
        max_memory: largest share of a device's memory that the plan may use, above 0 and at most 1; None: 0.9.
        solver: auto, exact (every plan, on a few devices) or paper.
        previous: plan that this one replaces; state stays in place as far as possible.
        progress: called with each warning about a topology that may be out of date.

    Raises:
        FileError, InputError: a file or an argument is wrong.
        RefusedError: the model fits on no part of the nodes.
    """
    if max_memory is not None and not 0 < max_memory <= 1:
        raise InputError(f"plan: max_memory: found {max_memory}; allowed: above 0, at most 1")
    if solver == "paper" and goal != "time":
        raise InputError("plan: solver paper: it plans for time only; leave goal out")
    run, spec = with_model_sizes(read_run(Path(run_file), _overrides(settings)), SystemRunner())
    measured = topology if isinstance(topology, Topology) else Topology.read(Path(topology))
    _warn(progress, stale_topology_text(measured, None, SystemClock().wall()))
    objective = Objective(goal=goal, watts=watts or {}, prices=prices or {}, usable=max_memory)
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
        site: profile of site.yaml; None: the first that matches this place.
        here: start the run in the background of this machine, whatever cluster.kind is.
        progress: called with each line of the checks, such as the chosen partition and when Slurm expects to start.

    Raises:
        FileError, InputError: a file or a setting is wrong, or there is no Slurm here.
        RefusedError: no partition takes the job, the model does not fit, or this process is inside of a job.
        CommandError: sbatch refused the job.
        StorageError: the run folder cannot be written.
    """
    say, runner, clock = _say(progress), SystemRunner(), SystemClock()
    slurm = Slurm(runner)
    overrides = (*_overrides(settings), *(("cluster.kind=local",) if here else ()))
    given, lines = with_site(RunInputs(Path(run_file), overrides, _path(topology), _path(plan)), site, slurm)
    with owner_only():
        say(lines)
        prepared = prepare_submission(given, here, slurm, runner, say)
        _warn(progress, stale_topology_text(prepared.topology, prepared.nodes or None, clock.wall()))
        if prepared.run.cluster.kind == "local":
            _warn(progress, login_node_words(len(prepared.nodes), slurm, os.environ))
            return LoadedRun(start_in_background(prepared, runner, clock, say).folder)
        if inside := os.environ.get("SLURM_JOB_ID"):
            raise RefusedError(
                f"submit: this process is inside of job {inside}, and a run that starts there takes its nodes; use the "
                "command `hpctrain submit` for that, or remove SLURM_JOB_ID from os.environ to queue a job of its own"
            )
        prepared, checked = check_for_queue(prepared, slurm, clock, say)
        return LoadedRun(queue_run(prepared, checked, slurm, runner, clock, say).folder)


def train(
    run_file: AnyPath, nodes: int | None = None, *, settings: Mapping[str, Any] | None = None,
    topology: AnyPath | None = None, plan: AnyPath | None = None, on_step: Callable[[MetricRow], None] | None = None,
    progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Train as processes of this machine until all steps are done, and return the run.

    An interrupt (Ctrl-C, or a notebook's stop button) saves a checkpoint, ends the processes and raises
    KeyboardInterrupt; a second one ends them at once. An exception of `on_step` stops the run in the same way.

    Args:
        nodes: number of virtual nodes; None: cluster.nodes of the run file.
        settings: values that replace those of the run file, by key: {"steps": 1000}.
        topology: topology file; None: the nodes are probed first.
        plan: plan file, obeyed to the letter; None: a plan is made.
        on_step: called with the metrics of each step.
        progress: called with a line for each event, such as a saved checkpoint or a recovery.

    Raises:
        FileError, InputError: a file or a setting is wrong; nothing was started, or the run ended at once.
        RefusedError: the model does not fit, or the topology or the plan is of other nodes.
        HpctrainError: the run ended before its last step; the message names the run folder.
    """
    runner, clock = SystemRunner(), SystemClock()
    given = RunInputs(Path(run_file), _overrides(settings), _path(topology), _path(plan))
    with owner_only():
        prepared = prepare(given, runner, nodes)
        _warn(progress, stale_topology_text(prepared.topology, prepared.nodes, clock.wall()))
        _warn_of_machine(progress, prepared.run, len(prepared.nodes))
        job = local_run.start(prepared, runs_folder(), runner, clock)
        _warn(progress, checkpoint_space_warning(prepared.run, prepared.spec, runs_folder(), prepared.plan))
        _warn(progress, dropout_warning(prepared.run))
        _warn(progress, omitted_secrets_text(job.folder.path))
        return _finish(job, on_step, progress)


def resume(
    run: LoadedRun | AnyPath, nodes: int | None = None, *, settings: Mapping[str, Any] | None = None,
    on_step: Callable[[MetricRow], None] | None = None, progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Go on with a run from its newest checkpoint, as processes of this machine, until all steps are done.

    Args:
        run: the run, its folder or its name.
        nodes: number of virtual nodes; None: as many as in the last attempt.
        settings: changed settings by key, as far as the checkpoint allows; {"steps": 2000} gives more steps.
        on_step: called with the metrics of each step.
        progress: called with a line for each event.

    Raises:
        InputError: there is no such run, it is in use, or a setting may not change.
        RefusedError: every checkpoint that the run had saved is lost.
        HpctrainError: the run ended before its last step.
    """
    folder = _folder(run)
    with owner_only():
        job = local_run.resume(folder, nodes, _overrides(settings), SystemRunner(), SystemClock())
        _warn_of_machine(progress, run_of(folder), len(job.processes))
        return _finish(job, on_step, progress)


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
        InputError: there is no such run.
    """
    clock, say = SystemClock(), progress or _log.info
    deadline = None if timeout_s is None else clock.now() + timeout_s
    watched, state = WatchedRun(_folder(run), clock), ""
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
    """
    with owner_only():
        return cancel_run(_folder(run), at_once, SystemRunner(), SystemClock())


def _finish(job: LocalJob, on_step: Callable[[MetricRow], None] | None, progress: Progress | None) -> LoadedRun:
    """Wait until the processes of a local run have ended, and return the run.

    Raises:
        HpctrainError: the run ended before its last step, with the class of its exit code.
        BaseException: what interrupted the wait, after the processes have ended.
    """
    folder, clock, say = job.folder.path, SystemClock(), progress or _log.info
    # After a resume, the run's files also hold earlier attempts.
    since_s = clock.wall() - 1.0
    say(f"run folder {folder}")
    _warn(progress, add_to_history("train", folder, None))
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        (job.kill if asked else job.stop)()
        asked = True

    with _on_sigterm(stop):
        try:
            for item in follow(folder, clock, until=lambda: not job.running(), since_s=since_s):
                if not isinstance(item, MetricRow):
                    say(describe_event(item))
                elif on_step is not None:
                    on_step(item)
        except BaseException:
            stop()
            try:
                job.wait(lambda: None)
            except BaseException:
                job.kill()
                job.wait(lambda: None)
            raise
        ended = job.wait(lambda: None)
    if ended.exit_code == EXIT_DONE:
        return LoadedRun(folder)
    kinds: Iterable[type[HpctrainError]] = (InputError, RefusedError)
    kind = next((kind for kind in kinds if kind.exit_code == ended.exit_code), HpctrainError)
    more = "resume goes on with it" if ended.stopped else f"the logs are in {folder}/logs/{job.attempt}"
    raise kind(f"{folder}: {ended.reason}; {more}")


@contextlib.contextmanager
def _on_sigterm(stop: Callable[..., None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, with which `cancel` and `hpctrain cancel` stop a run; only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn_of_machine(progress: Progress | None, run: Run, count: int) -> None:
    _warn(progress, check_gpus(count, run.cluster.device, os.environ))
    _warn(progress, login_node_words(count, Slurm(SystemRunner()), os.environ))


def _say(progress: Progress | None) -> Callable[[Iterable[str]], None]:
    say = progress or _log.info

    def say_all(lines: Iterable[str]) -> None:
        for line in lines:
            say(line)

    return say_all


def _warn(progress: Progress | None, lines: Sequence[str]) -> None:
    for line in lines:
        (progress or _log.warning)(line)


def _overrides(settings: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return settings as the texts KEY=VALUE that --set takes."""
    try:
        return tuple(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items())
    except (TypeError, ValueError) as error:
        raise InputError(f"settings: a value cannot be written into a run file: {error}") from None


def _path(path: AnyPath | None) -> Path | None:
    return None if path is None else Path(path)


def _folder(run: LoadedRun | AnyPath) -> Path:
    return run.folder if isinstance(run, LoadedRun) else load_run(run).folder
