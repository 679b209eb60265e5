"""Faults of a lab and their repair: nodes that are killed, silent, hang or slow, pairs without traffic, slow links."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.lab import network
from hpctrain.lab.config_files import find_cpu_control
from hpctrain.lab.daemons import namespace_pids, running_slurmd, start_slurmd
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.network import Direction
from hpctrain.lab.status import NodeState, node_states, scontrol

How = Literal["kill", "silent", "hang"]

HEAL_TIMEOUT_S = 60.0


def kill_nodes(machine: Machine, layout: LabLayout, names: Sequence[str], how: How = "kill") -> dict[str, int]:
    """Kill or stop all processes of some nodes at the same moment, including job steps; return the number of processes
    by node.

    Args:
        names: names of the nodes.
        how: `kill`: SIGKILL; the link stays up, and peers see closed connections. `silent`: the link goes down before
            SIGKILL, and peers see nothing. `hang`: SIGSTOP; the node's kernel answers, its processes do not.

    Raises:
        CommandError: a link cannot be set down, or a process does not end.
    """
    if how == "silent":
        machine.run_all(network.link_command(layout, name, up=False) for name in names)
    # Stop all processes before any is killed, because a real node dies at once. On a busy machine, an srun that
    # outlives its step for a moment would abort the step on all other nodes.
    stopped = {name: _signal_all(machine, layout, name, signal.SIGSTOP) for name in names}
    if how == "hang":
        return stopped
    return {name: machine.kill(lambda name=name: _pids(machine, layout, name)) for name in names}  # type: ignore[misc]


def _pids(machine: Machine, layout: LabLayout, name: str) -> list[int]:
    return namespace_pids(machine, layout.namespace(name))


def _signal_all(machine: Machine, layout: LabLayout, name: str, number: int) -> int:
    """Send a signal to every process of a node, twice: a process may have started another before it was stopped.

    Return the number of processes the second time.

    Args:
        name: name of the node.
        number: number of the signal.
    """
    for _ in range(2):
        pids = _pids(machine, layout, name)
        for pid in pids:
            machine.processes.signal(pid, number)
    return len(pids)


def cut(machine: Machine, layout: LabLayout, a: str, b: str) -> None:
    """Stop all traffic between the nodes `a` and `b`, in both directions.

    Raises:
        InputError: `a` and `b` are one node.
        CommandError: a command of the network failed.
    """
    if a == b:
        raise InputError(f"cut {a} {b}: two different nodes are needed; `lab kill --silent {a}` isolates one")
    if b not in _cuts(machine, layout, a):
        machine.run_all(network.cut_commands(layout, a, b))


def shape(
    machine: Machine,
    layout: LabLayout,
    names: Sequence[str],
    rate: str | None,
    directions: Sequence[Direction] = network.DIRECTIONS,
) -> None:
    """Change the rate of some nodes' links.

    Args:
        names: names of the nodes.
        rate: rate as for tc, such as 100mbit; None: no limit.
        directions: `in`: traffic into the node. `out`: traffic out of it.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
        CommandError: a command of the network failed.
    """
    for name in names:
        for direction in directions:
            machine.run_all(network.shape_commands(layout, name, direction, rate))


@contextlib.contextmanager
def shaped(
    machine: Machine,
    layout: LabLayout,
    names: Sequence[str],
    rate: str,
    directions: Sequence[Direction] = network.DIRECTIONS,
) -> Iterator[None]:
    """Change the rate of some nodes' links for the `with` block; afterwards the links have the spec's rates.

    Args:
        names: names of the nodes.
        rate: rate as for tc, such as 100mbit.
        directions: `in`: traffic into the node. `out`: traffic out of it.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
        CommandError: a command of the network failed.
    """
    try:
        shape(machine, layout, names, rate, directions)
        yield
    finally:
        for name in names:
            shape(machine, layout, [name], layout.spec.rate_of(layout.node(name)))


def limit_cpu(machine: Machine, layout: LabLayout, names: Sequence[str], cores: float) -> None:
    """Change the CPU time that all processes of each of some nodes may use together. The spec must give these nodes a
    CPU share.

    Args:
        names: names of the nodes.
        cores: CPU time of each node, in cores: 0.5 is half a core.

    Raises:
        InputError: a node has no CPU share, so its processes are in no cgroup.
        StorageError: the kernel refuses the share.
    """
    control = find_cpu_control(machine.mounts.read_text())
    for name in names:
        if control is None or layout.spec.cpu_share_of(layout.node(name)) is None:
            raise InputError(f"{name}: the lab's spec gives it no cpu_share, which cannot be added while the lab is up")
        for path, text in control.limit_files(control.node_group(name), cores):
            with storage_errors(path):
                path.write_text(text)


def heal(machine: Machine, layout: LabLayout, names: Sequence[str]) -> dict[str, NodeState]:
    """Undo every fault of some nodes and wait until Slurm uses them again; return their states in Slurm by name.

    Links go up without cuts and with the rates of the spec with which the lab was started (lab.json), nodes get its CPU
    shares, and stopped processes continue. A slurmd that is gone, or whose node Slurm has set down, is restarted.

    Args:
        names: names of the nodes.

    Raises:
        RefusedError: the controller does not answer.
        CommandError: a command failed, or a node is not healthy after a minute.
        StorageError: the kernel refuses a CPU share.
    """
    before = node_states(machine, layout)
    if not before:
        raise RefusedError(
            f"the controller does not answer; see {layout.logs / 'slurmctld.log'}, or `hpctrain lab up --replace`"
        )
    wall_s = machine.clock.wall()
    started = {name: _restore(machine, layout, name, before.get(name)) for name in names}

    def all_back() -> bool:
        states = node_states(machine, layout)
        return all(_is_back(states.get(name), wall_s if started[name] else None) for name in names)

    if not machine.wait(all_back, HEAL_TIMEOUT_S, pause_s=0.2):
        texts = {name: state.text for name, state in node_states(machine, layout).items() if name in names}
        raise CommandError(f"not healed within {HEAL_TIMEOUT_S:g} s: Slurm says {texts}; see {layout.logs}")
    states = node_states(machine, layout)
    return {name: states[name] for name in names}


def _restore(machine: Machine, layout: LabLayout, name: str, state: NodeState | None) -> bool:
    """Undo every fault of a node without waiting; return whether a slurmd was started.

    Args:
        state: the node's state in Slurm; None if Slurm does not know the node.
    """
    for peer in _cuts(machine, layout, name):
        machine.run_all(network.uncut_commands(layout, name, peer))
    machine.run(network.link_command(layout, name, up=True))
    shape(machine, layout, [name], layout.spec.rate_of(layout.node(name)))
    if (cores := layout.spec.cpu_share_of(layout.node(name))) is not None:
        limit_cpu(machine, layout, [name], cores)
    _signal_all(machine, layout, name, signal.SIGCONT)
    healthy = state is not None and state.healthy
    if state is not None and "DRAIN" in state.flags:
        machine.run(scontrol(layout, "update", f"NodeName={name}", "State=RESUME"))
    if running_slurmd(machine, layout, name):
        if healthy:
            return False
        # Slurm takes back a node that is down when the slurmd registers, which happens at its start. Job steps are
        # separate processes and live on until Slurm ends them.
        machine.kill(lambda: running_slurmd(machine, layout, name))
    start_slurmd(machine, layout, name, find_cpu_control(machine.mounts.read_text()))
    return True


def _is_back(state: NodeState | None, started_after_s: float | None) -> bool:
    if state is None or not state.healthy:
        return False
    if started_after_s is None:
        return True
    # Slurm stores whole seconds. Until the new slurmd has registered, Slurm still reports the start of the old one.
    return state.started_s is not None and state.started_s >= int(started_after_s)


def _cuts(machine: Machine, layout: LabLayout, name: str) -> list[str]:
    return network.parse_cuts(layout, machine.run(network.list_cuts_command(layout, name)).stdout)
