"""A cluster of agents on one simulated clock: the real `Agent`, with connections, workers, files and threads that a
schedule can disturb at any moment.

Nothing here waits or starts threads, so a schedule runs in milliseconds and, with the same seed, always in the same
way.
"""

from __future__ import annotations

from typing import Any

from hpctrain.agent.agent import Agent, AgentIdentity
from hpctrain.agent.next_generation import AgentContext
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.bench.recovery.simulated_parts import (
    FOLDER,
    MemoryStore,
    ProcessKilled,
    SilentLog,
    SilentSocket,
    SimulatedGroup,
    SimulatedMesh,
    SimulatedSource,
    SimulatedThread,
)
from hpctrain.bench.recovery.simulated_tree import SimulatedTree
from hpctrain.bench.recovery.simulated_world import InvariantViolation, SimulatedHost, SimulatedWorld

ATTEMPT = 1
"""The attempt to which the agents belong. An earlier one left no file."""


class SimulatedCluster(SimulatedWorld):
    """Agents, network, files and clock of one schedule."""

    def start(self, node: str) -> None:
        """Start an agent on a node that has none, as another incarnation. If it cannot read the run folder, try again
        each simulated second."""
        if node in self.processes:
            return
        self._count += 1
        try:
            self.processes[node] = SimulatedProcess(self, node, f"{node}-{self._count}")
        except StorageError:
            self.at(1.0, lambda: self.start(node))
            return
        self.processes[node].wake()

    def kill(self, node: str) -> None:
        """Kill the agent of a node with its workers. The other agents notice that its connections have closed; those
        that are cut off from the node notice it when the cut is over."""
        process = self.processes.pop(node, None)
        if process is None:
            return
        process.alive = False
        process.note_end()
        for other in list(self.processes.values()):
            self._close(other, process)

    def _close(self, other: SimulatedHost, gone: SimulatedHost) -> None:
        def close() -> None:
            if frozenset((other.node, gone.node)) in self.links.cut:
                self.at(0.5, close)  # the kernel of the other side says so only where it is reached
            elif other.alive:
                other.note_closed(gone.node, gone.incarnation)
                other.wake()

        self.at(self.chance.uniform(*self.links.delay_s), close)

    def process(self, node: str) -> SimulatedProcess | None:
        """Return the process of the agent on a node; None if there is none."""
        process = self.processes.get(node)
        assert process is None or isinstance(process, SimulatedProcess)
        return process

    def is_training(self, nodes: set[str]) -> bool:
        """Return whether the agents of `nodes` are in the newest generation, and all its workers run."""
        if not self.records:
            return False
        newest = self.records[max(self.records)]
        working = self.plans[newest.plan].nodes
        if not set(working) <= self.processes.keys() or not nodes <= self.processes.keys():
            return False
        at_work = all(self.processes[node].training == newest.number for node in working)
        return at_work and all(self.processes[node].generation == newest.number for node in nodes)


class SimulatedProcess(SimulatedHost):
    """The process of one agent."""

    def __init__(self, cluster: SimulatedCluster, node: str, incarnation: str) -> None:
        super().__init__(cluster, node, incarnation)
        self._cluster = cluster
        self.mesh = SimulatedMesh(self) if cluster.fan_out is None else SimulatedTree(self, cluster.fan_out)
        self.group = SimulatedGroup(self)
        self.files = SimulatedThread(self, uses_files=True)
        making = SimulatedThread(self, uses_files=False)
        fakes: dict[str, Any] = {
            "peers": self.mesh, "group": self.group, "source": SimulatedSource(self), "store": MemoryStore(self),
        }  # fmt: skip
        threads: Any = (making, self.files, SilentSocket)
        log: Any = SilentLog()
        context = AgentContext(log, self, lambda: None, *threads)
        place = AgentIdentity(node, cluster.nodes, "127.0.0.1", incarnation, ATTEMPT, FOLDER)
        self.agent = Agent(place, cluster.limits, context=context, **fakes)
        self.agent.start()

    def take_in(self, node: str, content: object) -> None:
        self.mesh.take_in(node, content)

    def note_closed(self, node: str, incarnation: str) -> None:
        self.mesh.note_closed(node, incarnation)

    def die(self) -> None:
        self._cluster.kill(self.node)

    def take_turn(self) -> None:
        self._cluster.turns += 1
        disk = self._cluster.disk
        try:
            disk.in_loop = True
            code = self.agent.turn()
        except ProcessKilled:
            self.die()
            return
        except HpctrainError as error:
            raise InvariantViolation(f"the agent of {self.node} crashed: {error}") from error
        finally:
            disk.in_loop = False
        record = self.agent.record
        if record is not None and record.number != self.generation:
            self.note_entered(record)
        if code is not None:
            self._cluster.exits[self.node] = code
            self.die()
            return
        self.wake(self.mesh.turn_s)
