"""`python -m hpctrain.node run`: the process of one node in one attempt. It probes if the run folder has no topology,
and then is the node's agent until the attempt ends. A topology that the attempt must not use has another name by then
(`drop_stale_topology`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hpctrain.agent.agent import Agent, AgentIdentity
from hpctrain.agent.event_log import EventLog, crash_message
from hpctrain.agent.generation_store import GenerationStore
from hpctrain.agent.group import WorkerGroup, process_incarnation
from hpctrain.agent.next_generation import AgentContext
from hpctrain.agent.peers import PeerMesh, attempt_key
from hpctrain.agent.tree.order import FULL_MESH_NODES
from hpctrain.agent.tree.routing import TreeRouting
from hpctrain.agent.view import DecisionLimits
from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import EXIT_REFUSED, EXIT_RESUMABLE, HpctrainError, RefusedError, StorageError
from hpctrain.base.forking import ForkingRunner, ForkServerExit
from hpctrain.base.helper_thread import HelperThread
from hpctrain.base.owned_files import read_owned
from hpctrain.base.process import WORKER, Runner, SystemRunner
from hpctrain.node.environment import check_same_version, record_environment
from hpctrain.node.exit_markers import has_returned, name_closing_node, report_batch_node_loss, write_exit_marker
from hpctrain.node.generation_maker import GenerationMaker
from hpctrain.node.node_metrics import recorded_node_metrics
from hpctrain.node.plan_adviser import RunPlanAdviser
from hpctrain.node.probe import NodeAddress, Parent, add_node_arguments, node_address
from hpctrain.node.staging import stage_data, staging_limit_s
from hpctrain.node.state_segments import StateSegments, switches_of
from hpctrain.node.worker_threads import share_environment, thread_environment
from hpctrain.probe.measure.settings import ProbeSettings, local_settings, preflight_mode, with_shared_nodes
from hpctrain.probe.protocol.run import ProbeNode, probe_nodes
from hpctrain.probe.system.host import interface_of
from hpctrain.records.history.generation import GENERATIONS, Generation
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.code_copy import code_on_path
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.secrets import secret_values

FINISHED_FILE = "finished"
"""File in a run folder that says that the run is done. The job script checks for it, because srun may still wait for
the task of a lost node."""
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Variables with which you may set torch's GPU allocator yourself."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
PROBE_WAIT_S = 300.0
"""Seconds for which the other nodes wait until the first node has written topology.json."""


def main(argv: list[str]) -> int:
    """Probe, plan and train as one node; return the exit code of this node's agent, or that of a node that does not
    begin to train.

    Raises:
        HpctrainError: an option, the run folder or the probe does not allow it, or an error ended the agent.
    """
    options = _parse(argv)
    stop = _StopRequest(options.parent)
    stop.listen()
    here = node_address(options)
    folder: Path = options.folder
    check_trusted(folder)
    if not here.local and (folder / FINISHED_FILE).exists():
        # The job script starts a task again whose srun ended with code 0 while others run: that of a lost node.
        return 0
    event_log = EventLog(folder / "events.jsonl", here.node, options.attempt, SystemClock())
    try:
        # First of all: another version may read the run's files in another way.
        check_same_version(RunFolder(folder), options.attempt, here.node)
    except RefusedError as error:
        event_log.write("failed", -1, str(error), exit_code=EXIT_REFUSED)
        write_exit_marker(folder, options.attempt, here.node, here.nodes, len(here.nodes), EXIT_REFUSED, _batch_host())
        return EXIT_REFUSED
    run = run_of(folder)
    incarnation = process_incarnation(platform.node(), time.time())
    place = AgentIdentity(here.node, here.nodes, here.addr, incarnation, options.attempt, folder)
    try:
        return _take_part(place, here, run, event_log, stop)
    except Exception as error:
        number, what = _newest_generation(place), type(error).__name__
        event_log.write("agent_crashed", number, crash_message(here.node, error), node=here.node, error=what)
        raise


def _take_part(place: AgentIdentity, here: NodeAddress, run: Run, event_log: EventLog, stop: _StopRequest) -> int:
    """Probe if the run folder has no topology, prepare the workers' environment, and be the node's agent until
    the attempt ends; return the agent's exit code. Unless `here.local`, the node then calls `name_closing_node` if the
    code is 0, and writes its exit marker if the code is not 0.

    The training does not begin if somebody asks to stop during the probe (EXIT_RESUMABLE) or the probe refuses the
    nodes (EXIT_REFUSED).

    Args:
        place: identity of the agent.
        here: the node as its options name it.
    """
    folder, attempt, nodes, local = place.folder, place.attempt, place.nodes, here.local
    if place.node == nodes[0] and not has_returned(folder, attempt):
        event_log.write("attempt_started", -1, f"attempt {attempt} on {len(nodes)} nodes", nodes=list(nodes))
    _record_environment(place)
    logs = folder / "logs" / str(attempt)
    given = _worker_environment(place, run, logs)
    env = given | share_environment(given)
    forking = ForkingRunner(
        WORKER, ["fork", "--folder", str(folder)], env, _fork_server_loss_logger(place.node, event_log)
    )
    with contextlib.closing(forking) as runner:
        try:
            with stop.at_once():
                topology = _ensure_topology(place, run, event_log, here, runner)
        except _Stopped:
            reason = f"asked to stop by {stop()} before the training began; there was nothing new to save"
            event_log.write("preempted", -1, reason, asked_by=stop())
            return EXIT_RESUMABLE
        if topology.verdict.status == "refuse":
            if not local:
                # The job script then does not wait for the task of a node that does not answer.
                write_exit_marker(folder, attempt, place.node, nodes, len(nodes), EXIT_REFUSED, _batch_host())
            return EXIT_REFUSED
        staged = stage_data(run.data, event_log, os.environ, SystemClock(), stop)
        threads = thread_environment(topology, here, given)
        files = HelperThread("files")
        group = WorkerGroup(folder, logs, place.node, runner, env | staged | threads, files)
        switches = switches_of(topology) if run.recovery.snapshot_every != "off" else None
        memory = None
        if run.recovery.memory != "off":
            memory = StateSegments(place.node, switches, keeps_live=run.recovery.memory == "auto")
        peer_lost = functools.partial(report_batch_node_loss, folder, attempt, place.node, _batch_host())
        adviser = None
        if run.adapt_mode != "off":
            adviser = RunPlanAdviser(folder, run, nodes, event_log, attempt)
        context = AgentContext(
            event_log, SystemClock(), stop, files=files, memory=memory, peer_lost=peer_lost, adviser=adviser
        )
        here_found = next((node for node in topology.nodes if node.id == place.node), None)
        with event_log.in_background(), contextlib.ExitStack() as recording:
            if here_found is not None:
                recording.enter_context(
                    recorded_node_metrics(folder, here_found, attempt, len(nodes), run.energy.every_s, event_log)
                )
            code = _agent(place, run, topology, group, context).run()
    if code == 0:
        (folder / FINISHED_FILE).touch()
    if local:
        return code
    last = _last_generation(place)
    members = list(nodes) if last is None else [member.node for member in last.members]
    if code == 0:
        working = members if last is None else Plan.read(folder / last.plan, owned=True).nodes
        with contextlib.suppress(StorageError):  # the run is done: Slurm then ends the job later
            name_closing_node(folder, attempt, place.node, working, _batch_host())
    else:
        write_exit_marker(folder, attempt, place.node, members, run.recovery.min_nodes, code, _batch_host())
    return code


def _batch_host() -> str | None:
    """Return the node of the job's script; None if the run has no job of its own."""
    return os.environ.get("HPCTRAIN_BATCH_HOST")


def _record_environment(place: AgentIdentity) -> None:
    """Append this node's line to environments.jsonl. Any error is only printed: the run goes on without the record."""
    try:
        is_first = place.node == place.nodes[0]
        record_environment(place.folder, place.attempt, place.node, is_first, SystemRunner(), SystemClock(), os.environ)
    except Exception as error:
        print(f"not recorded: the software of {place.node} ({error})", flush=True)


def _last_generation(place: AgentIdentity) -> Generation | None:
    """Return the newest generation of this attempt; None before the attempt's first generation."""
    newest = GenerationStore(place.folder / GENERATIONS).newest()
    return newest if newest is not None and newest.attempt == place.attempt else None


def _newest_generation(place: AgentIdentity) -> int:
    """Return the number of the attempt's newest generation; -1 before the first one, or if it cannot be read."""
    with contextlib.suppress(HpctrainError, OSError):
        newest = _last_generation(place)
        return -1 if newest is None else newest.number
    return -1


def _fork_server_loss_logger(node: str, event_log: EventLog) -> Callable[[ForkServerExit], None]:
    """Return a function that writes the event fork_server_lost; it is to be called when a fork server ends by
    itself. The agent's loop calls it, so it reads no file."""

    def tell(loss: ForkServerExit) -> None:
        how = {"signal": -loss.code} if loss.code < 0 else {"exit_code": loss.code}
        text = f"{node}: {loss.words()}"
        event_log.write("fork_server_lost", event_log.generation, text, node=node, replaced=loss.replaced, **how)

    return tell


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpctrain.node run")
    parser.add_argument("--folder", type=Path, required=True)
    given = os.environ.get("HPCTRAIN_ATTEMPT")
    parser.add_argument("--attempt", type=int, default=given, required=given is None, help="default: HPCTRAIN_ATTEMPT")
    add_node_arguments(parser)
    # The job script starts a step on each node: the step's nodes are not those of the attempt.
    parser.set_defaults(nodes=os.environ.get("HPCTRAIN_NODES"))
    return parser.parse_args(argv)


class _Stopped(BaseException):
    """Raised when a stop is requested within a block of `_StopRequest.at_once`, before the training begins. It is a
    BaseException, so that no handler of errors catches it."""


class _StopRequest:
    """The request to save a checkpoint and exit. Calling the object returns who asked, such as SIGTERM; None if nobody
    did.

    Slurm sends SIGTERM to a preempted job, and SIGUSR2 before the time limit (on some clusters also at preemption). A
    local run stops when its supervisor, the parent process, has ended.
    """

    def __init__(self, parent: int | None) -> None:
        self._parent = None if parent is None else Parent(parent)
        self._asked_by: str | None = None
        self._at_once = False

    def listen(self) -> None:
        """Install the handlers of SIGTERM and SIGUSR2, and unblock these signals, which were blocked while the program
        was loading."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a stop request interrupt the `with` block, even a wait for other nodes within it.

        Raises:
            _Stopped: a stop was requested before the `with` block or within it.
        """
        self._at_once = True
        try:
            if self._asked_by is not None:
                raise _Stopped
            yield
        finally:
            self._at_once = False

    def __call__(self) -> str | None:
        if self._asked_by is None and self._parent is not None and self._parent.is_gone():
            return "the end of its supervisor"
        return self._asked_by

    def _ask(self, number: int, *_: object) -> None:
        self._asked_by = self._asked_by or signal.Signals(number).name
        if self._at_once:
            self._at_once = False  # only once: a second signal must not disturb the cleanup
            raise _Stopped


def _ensure_topology(
    place: AgentIdentity, run: Run, event_log: EventLog, here: NodeAddress, runner: Runner
) -> Topology:
    """Return the topology in the run folder; without one, probe first. The first node writes the events: the probe's
    result, excluded nodes and a refusal.

    Args:
        here: the node as its options name it.
    """
    path = place.folder / "topology.json"
    given = path.exists()
    if not given:
        device, count, clock = run.cluster.device, len(place.nodes), SystemClock()
        preflight = ProbeSettings(device=device, mode=preflight_mode(count))
        if any(line.get("shared") for line in RunFolder(place.folder).attempts()[place.attempt :][:1]):
            preflight = with_shared_nodes(preflight)
        settings = replace(
            local_settings(count, device) if here.local else preflight, cpu_devices=run.cluster.devices_per_node or 1
        )
        sets = here.core_sets(settings.cpu_devices)
        node = ProbeNode(place.node, place.addr, place.folder, settings, runner, clock, sets)
        topology = probe_nodes(node, place.nodes, ProbeProgress(event_log, clock))
        if topology is not None:
            topology.write(path)
            event_log.write(
                "probed",
                -1,
                f"{len(topology.nodes)} nodes, verdict {topology.verdict.status}",
                status=topology.verdict.status,
                exclude=topology.verdict.exclude,
                seconds=topology.provenance.wall_s,
            )
    deadline = time.monotonic() + PROBE_WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise HpctrainError(f"{path}: the first node did not write it within {PROBE_WAIT_S:g} s")
        time.sleep(0.05)
    topology = Topology.read(path, owned=True)
    excluded = sorted(set(topology.verdict.exclude) & set(place.nodes))
    if given and excluded and place.node == place.nodes[0]:
        # No probe of this attempt reports it, and the next job has to know: this attempt only leaves them out of its
        # plan.
        text = f"the topology at hand excludes {', '.join(excluded)} of {len(place.nodes)} nodes"
        event_log.write("probed", -1, text, status=topology.verdict.status, exclude=excluded)
    if topology.verdict.status == "refuse" and place.node == place.nodes[0]:
        faults = "; ".join(fault.text for fault in topology.verdict.faults)
        # The next attempt may get other nodes: the run itself has not failed.
        event_log.write("failed", -1, f"the probe refuses these nodes: {faults}", exit_code=EXIT_REFUSED, by_probe=True)
    return topology


def _agent(place: AgentIdentity, run: Run, topology: Topology, group: WorkerGroup, context: AgentContext) -> Agent:
    key = read_owned(place.folder / "key", private=True).decode().strip()
    tree = None
    if len(place.nodes) > FULL_MESH_NODES:
        tree = TreeRouting(place.node, place.nodes, run.recovery.heartbeat_timeout_s)
    secret = attempt_key(key, place.attempt)
    peers = PeerMesh(place.folder / "agents", place.node, place.nodes, place.addr, secret, context.files, tree)
    limits = DecisionLimits(
        run.recovery,
        run.step_timeout_s,
        # A node joins only when its data is staged.
        join_timeout_s=DecisionLimits.join_timeout_s + staging_limit_s(run.data),
        broken_links=tuple(topology.fabric.broken),
        advised_against=tuple(topology.verdict.exclude),
    )
    return Agent(
        place, limits, peers, group, GenerationMaker(place.folder, run, place.nodes, context.event_log), context
    )


def _worker_environment(place: AgentIdentity, run: Run, logs: Path) -> dict[str, str]:
    """Return the environment variables of this node's workers: those of this process, and more.

    They hold the run's secrets, and put the run's copy of your code first on the module path, also for processes that
    workers start. Unless set already, they select the network interface of this node's address for collectives, make
    NCCL write its last operations into the folder `logs` at a timeout, and let the segments of torch's GPU allocator
    grow, which leaves fewer gaps between allocations.
    """
    env = dict(os.environ) | secret_values(run, os.environ)
    env |= code_on_path(place.folder, env)
    interface = interface_of(place.addr)
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl-trace-rank-"))
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not ALLOCATOR_VARIABLES & env.keys():
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env


EVERY_S = 2.0
"""Fewest seconds between two events about one phase of the probe."""

_WORDS = {
    "join": "{done} of {planned} nodes have come",
    "links": "the links between the nodes, {done} of {planned} rounds are done",
    "devices": "the devices, {done} of {planned} nodes have loaded what measures them",
    "backend": "messages over the training backend between {planned} nodes",
}


class ProbeProgress:
    """A callback for the progress of a probe: it is called with (phase, done, planned), and writes an event when a
    phase begins and at each further quarter of the phase."""

    def __init__(self, event_log: EventLog, clock: Clock) -> None:
        self._event_log = event_log
        self._clock = clock
        self._phase = ""
        self._quarter = 0
        self._written = float("-inf")

    def __call__(self, phase: str, done: int, planned: int) -> None:
        if not planned:
            return  # one node has no links
        now, quarter = self._clock.now(), 4 * done // planned
        if phase == self._phase and (quarter <= self._quarter or now - self._written < EVERY_S):
            return
        self._phase, self._quarter, self._written = phase, quarter, now
        words = _WORDS[phase].format(done=done, planned=planned)
        self._event_log.write("probing", -1, words, phase=phase, done=done, planned=planned)
