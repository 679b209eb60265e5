"""The parts of a simulated process that stand in for those which wait, start processes or touch files: connections,
workers, threads, the shared folder, and what makes records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.agent.agreement_messages import AgreementMessage
from hpctrain.agent.generation_store import GenerationStore, Proposal, ProposedGeneration
from hpctrain.agent.group import WorkerUpdate
from hpctrain.agent.peer_messages import HEARTBEAT_S, Announcement
from hpctrain.agent.tree.messages import Relayed
from hpctrain.agent.view import PeerView, WorkerView
from hpctrain.base.errors import EXIT_NEW_PLAN, FieldError, FileError, HpctrainError, StorageError
from hpctrain.bench.recovery.simulated_world import SimulatedHost, SimulatedPlan
from hpctrain.records.format.document import Document
from hpctrain.records.history.generation import GENERATIONS, Generation, StoreAddress

FOLDER = Path("/run")
"""Name of the run folder; nothing is written there."""


class ProcessKilled(BaseException):
    """The process of an agent ends in the middle of a turn."""


class _Device(NamedTuple):
    node: str


class _Heartbeat(NamedTuple):
    """A heartbeat on its way. A connection keeps the order of heartbeats, so one that others have overtaken is
    dropped."""

    sent_s: float
    announcement: Announcement


class SimulatedMesh:
    """The connections of one agent; it stands in for `PeerMesh`."""

    hears_all = True
    turn_s = 0.9
    """Longest time between two turns of an agent."""

    def __init__(self, process: SimulatedHost) -> None:
        self._process = process
        self._world = process.world
        self._views = {node: PeerView(node) for node in process.world.nodes if node != process.node}
        self._arrived: list[tuple[str, object]] = []
        self._messages: list[tuple[str, AgreementMessage]] = []
        self._last_beat = float("-inf")
        self._newest: dict[str, float] = {}
        """Node -> when its newest heartbeat that has arrived was sent."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def watch(self, file: object) -> None: ...
    def unwatch(self, file: object) -> None: ...

    def store_secret(self, record: Generation) -> str:
        """Return an empty secret."""
        return ""

    def views(self) -> tuple[PeerView, ...]:
        """Return the other agents as last seen."""
        return tuple(self._views.values())

    def wake(self) -> None:
        """Let the agent take its next turn."""
        self._process.wake()

    def take_in(self, node: str, content: object) -> None:
        """Keep a message for the agent's next turn, and let this turn come at once, unless the message is a heartbeat
        without news."""
        if isinstance(content, _Heartbeat):
            if content.sent_s < self._newest.get(node, 0.0):
                return
            self._newest[node], content = content
        self._arrived.append((node, content))
        view = self._views[node]
        if isinstance(content, Announcement):
            news = (content.phase, content.generation, content.incarnation, content.unheard)
            if view.connected and news == (view.phase, view.generation, view.incarnation, view.unheard):
                return  # most heartbeats say nothing new
        self._process.wake()

    def note_closed(self, node: str, incarnation: str) -> None:
        """Note that the connection to an agent has closed."""
        self._arrived.append((node, incarnation))

    def exchange(self, now: float, announcement: Announcement, at_once: bool = False) -> None:
        """Take in what has arrived, and send a heartbeat if one is due, or in any case with `at_once`."""
        arrived, self._arrived = self._arrived, []
        for node, content in arrived:
            if isinstance(content, Announcement):
                self._views[node] = content.seen(now)
            elif isinstance(content, AgreementMessage):
                self._messages.append((node, content))
            elif self._views[node].incarnation == content:
                view = self._views[node]
                self._views[node] = replace(view, connected=False, lost=view.lost or view.connected)
        if at_once or now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            for node in self._views:
                self._send(node, _Heartbeat(self._world.now, announcement))

    def send(self, nodes: Collection[str], message: AgreementMessage) -> None:
        """Send a message to some nodes."""
        for node in nodes:
            self._send(node, message)

    def is_near(self, node: str) -> bool:
        """Return True: each agent has a connection to every other agent."""
        return True

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        """Return (sender, message) for each message of the agreement that has arrived since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def _send(self, node: str, content: object) -> None:
        process, carried = self._process, content.message if isinstance(content, Relayed) else content
        if process.killed_at is not None and process.killed_at(carried):
            raise ProcessKilled
        if process.paused_at is not None and process.paused_at[0](carried):
            process.pause(process.paused_at[1])
            process.paused_at = None
        late_s = max(0.0, process.paused_until - self._world.now)
        self._world.deliver(process.node, node, content, late_s)


class SimulatedGroup:
    """The workers of one node; it stands in for `WorkerGroup`."""

    def __init__(self, process: SimulatedHost) -> None:
        self._process = process
        self.dying_starts = 0
        """How many of the next starts give workers that die at once."""
        self.hangs_since: float | None = None
        self._exit_code: int | None = None
        self._news: list[WorkerUpdate] = []

    def open_logs(self, count: int) -> list[Any]:
        """Return no logs.

        Raises:
            StorageError: the folder cannot be written now.
        """
        self._process.world.disk.check("log")
        return []

    def start(self, now: float, orders: list[Any], store: object, logs: object) -> None:
        """Start the workers."""
        if not orders:
            return
        self._process.training = orders[0].generation
        if self.dying_starts > 0:
            self.dying_starts -= 1
            self.die()

    def die(self) -> None:
        """Let the workers be killed by a signal."""
        if self._process.training is not None:
            self._process.training, self._exit_code = None, -9
            self._process.wake()

    def news(self, now: float) -> list[WorkerUpdate]:
        """Return no news: `view` shows the end of workers."""
        return []

    def channels(self) -> list[Any]:
        """Return no channels."""
        return []

    def doing(self, places: object) -> tuple[Any, ...]:
        """Return no activity."""
        return ()

    def view(self) -> WorkerView:
        """Return the state of the workers."""
        at_work = self._process.training is not None
        since = self.hangs_since if self.hangs_since is not None and at_work else self._process.world.now
        return WorkerView(int(at_work), self._exit_code, since)

    def leave(self, number: int) -> None:
        """Let the workers of generation `number` end as those that stop for another plan."""
        if self._process.training == number:
            self._process.training, self._exit_code = None, EXIT_NEW_PLAN
            self._process.wake()

    def order(self, order: object) -> None:
        """Never called. No schedule of faults asks a run to stop (`StopOrder`), and no simulated agent has a
        `PlanAdviser`, from which a `ChangePlanOrder` would come."""

    def kill(self) -> bool:
        """End the workers. Return True: no worker runs any more."""
        self._process.training = self._exit_code = self.hangs_since = None
        self._process.note_end()
        return True


class SimulatedThread(Executor):
    """A thread of an agent's process. Each call takes its effect at one moment, and is done at a later one, so the
    process may end in between."""

    def __init__(self, process: SimulatedHost, uses_files: bool) -> None:
        self._process = process
        self._uses_files = uses_files
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_busy = False
        self.dies_after: Callable[[Any], bool] | None = None
        """Called with the result of each call; True kills the process before the agent has it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a call, whose result the future gets at a later simulated time."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._go_on()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the process is over."""

    def _go_on(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        world = self._process.world
        span = world.disk.delay_s if self._uses_files else world.make_s
        world.at(world.chance.uniform(*span), self._take_effect)

    def _take_effect(self) -> None:
        process, world = self._process, self._process.world
        if not process.alive:
            return
        hung = world.disk.hangs_until.get(process.node, 0.0) - world.now if self._uses_files else 0.0
        wait_s = max(hung, process.paused_until - world.now)
        if wait_s > 0:
            world.at(wait_s + 0.001, self._take_effect)
            return
        future, call = self._waiting.popleft()
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except (HpctrainError, OSError) as failure:
            error = failure
        if self.dies_after is not None and self.dies_after(result):
            process.die()
            return

        def finish() -> None:
            self._is_busy = False
            if not process.alive:
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._go_on()

        world.at(world.chance.uniform(*world.disk.delay_s), finish)


class MemoryStore(GenerationStore):
    """The real `GenerationStore`, on the files of the simulated disk."""

    def __init__(self, process: SimulatedHost) -> None:
        super().__init__(FOLDER / GENERATIONS)
        self._world = process.world

    def list_records(self) -> list[Path]:
        self._world.disk.check("gen-")
        return [path for path in self._world.disk.files if path.name.startswith("gen-")]

    def read(self, path: Path, kind: type[Any]) -> Any:
        self._world.disk.check(path.name)
        return self._world.disk.files.get(path)

    def create(self, path: Path, document: Document) -> bool:
        self._world.disk.check(path.name)
        if path in self._world.disk.files:
            return False
        if isinstance(document, Generation):
            self._world.note_record(document)
        self._world.disk.files[path] = document
        return True


class SimulatedSource:
    """Makes records of generations in which all members but the spares hold ranks."""

    def __init__(self, process: SimulatedHost) -> None:
        self._process = process

    def make(self, proposal: Proposal) -> ProposedGeneration:
        world = self._process.world
        members = proposal.members
        world.disk.check("plan-")
        name = f"{GENERATIONS}/plan-{proposal.number}-{len(world.plans)}.json"
        working = members[: max(1, len(members) - world.spares)]
        plan: Any = SimulatedPlan(tuple(_Device(member.node) for member in working))
        world.plans[name] = plan
        record = Generation(
            number=proposal.number, attempt=proposal.attempt, members=list(members), plan=name,
            reason=proposal.reason[:100], proposer=proposal.proposer,
            store=StoreAddress(addr="127.0.0.1", port=1, node=members[0].node),
        )  # fmt: skip
        return ProposedGeneration(record, plan, lambda: None)

    def plan_of(self, record: Generation) -> Any:
        try:
            self._process.world.disk.check("plan-")
        except StorageError as error:
            raise FileError(record.plan, [FieldError("", str(error))]) from error
        return self._process.world.plans[record.plan]

    def skip_checkpoint(self, record: Generation, reason: str) -> None:
        raise AssertionError("simulated workers load no checkpoint")


class SilentLog:
    """A log of events that forgets them."""

    def write(self, *content: object, **data: object) -> None: ...


class SilentSocket:
    """A listening socket that nobody connects to."""

    def __init__(self, addr: str) -> None: ...
    def close(self) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1
