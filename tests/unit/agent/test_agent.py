"""An agent's loop with a scripted network and workers that are done at once."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_clock import FakeClock
from steps_made import truth, write_generation

from hpctrain.agent.agent import Agent, AgentIdentity
from hpctrain.agent.agreement import Agreement
from hpctrain.agent.agreement_messages import Accepted, AcceptRequest, AgreementMessage, Prepare, Promise
from hpctrain.agent.event_log import EventLog
from hpctrain.agent.generation_store import GenerationStore, Proposal, ProposedGeneration
from hpctrain.agent.group import WorkerLog, WorkerUpdate
from hpctrain.agent.next_generation import AgentContext
from hpctrain.agent.peers import Announcement
from hpctrain.agent.view import DecisionLimits, PeerView, WorkerView
from hpctrain.agent.worker_messages import MemoryOrder, StartOrder, StepDone, WorkerReady
from hpctrain.base.errors import RefusedError, StorageError, UntrustedError
from hpctrain.planner import make_plan
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.history.memory_state import HeldState, MemorySource, StateHolder
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

NODES = ("a", "b", "c")


def peer(node: str) -> PeerView:
    return PeerView(node, node, True, False, 0.0, 0, "fault", "it broke", addr="127.0.0.1", store_port=1)


class Network:
    """The other agents as this one sees them, which vote for whatever it proposes; each wait of the agent moves the
    clock and the script."""

    def __init__(self, clock: FakeClock, script: Callable[[], None]) -> None:
        self._clock = clock
        self._script = script
        self.heard = {node: peer(node) for node in NODES[1:]}
        self.held: dict[str, tuple[HeldState, ...]] = {}
        self.is_over = lambda: True
        """Whether the others say that the first generation is over."""
        self._answers: list[tuple[str, AgreementMessage]] = []

    def views(self) -> tuple[PeerView, ...]:
        changed: Any = {"last_seen": self._clock.now(), "phase": "fault" if self.is_over() else "running"}
        return tuple(replace(view, **changed) for view in self.heard.values())

    def wait(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self._script()
        time.sleep(0.001)  # the record is made in a thread of its own

    def store_secret(self, record: Generation) -> str:
        return ""

    hears_all = True

    def is_near(self, node: str) -> bool:
        return True

    def send(self, nodes: Collection[str], message: AgreementMessage) -> None:
        for node in nodes:
            if isinstance(message, Prepare | AcceptRequest):
                ballot: dict[str, Any] = {
                    "number": message.number,
                    "round": message.round,
                    "proposer": message.proposer,
                }
                if isinstance(message, Prepare):
                    answer: AgreementMessage = Promise(**ballot, incarnation=node, held=self.held.get(node, ()))
                else:
                    answer = Accepted(**ballot, incarnation=node)
                self._answers.append((node, answer))

    def take_messages(self) -> list[tuple[str, AgreementMessage]]:
        answers, self._answers = self._answers, []
        return answers

    def open(self) -> None: ...
    def close(self) -> None: ...
    def wake(self) -> None: ...
    def exchange(self, now: float, announcement: Announcement, at_once: bool = False) -> None: ...


class Workers:
    """Workers that are done with the generation they are started for, but for the first."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.starts = 0

    def open_logs(self, count: int) -> list[WorkerLog]:
        return []

    def start(self, now: float, orders: object, store: object, logs: object) -> None:
        self.starts += 1
        self.exit_code = 0 if self.starts > 1 else None

    def view(self) -> WorkerView:
        return WorkerView(1, self.exit_code, float("inf"))

    def news(self, now: float) -> list[object]:
        return []

    def channels(self) -> list[object]:
        return []

    def kill(self) -> bool:
        return True


class Source:
    """Makes each generation by a function; the run has no checkpoint."""

    def __init__(self, make: Callable[[Proposal], ProposedGeneration], plan: Plan) -> None:
        self.make = make
        self._plan = plan

    def plan_of(self, record: Generation) -> Plan:
        return self._plan


def first_generation(folder: Path) -> Plan:
    run = Run.model_validate(
        {
            "steps": 4, "model": {"dims": {"layers": 4, "dim": 32, "heads": 4, "vocab": 64}}, "batch": {"global": 6},
            "data": {"train": ["d"], "seq_len": 32},
        }
    )  # fmt: skip
    device = Device(id="cpu0", type="cpu", flops={"fp32": 1e9}, memory_bytes=4e9, memory_bytes_per_s=5e9, launch_s=2e-7)
    topology = Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in NODES],
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=3)]),
    )
    plan = make_plan(run, run.spec(), topology)
    write_generation(folder, plan, run, topology, truth(), 1)
    return plan


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_told_of_a_generation_belongs_to_the_decision_it_was_made_for(tmp_path: Path, planned: bool) -> None:
    """The cut that left c out heals while the record is made: c was left out all the same, and is not lost."""
    plan = first_generation(tmp_path)
    clock = FakeClock()
    asked, healed = threading.Event(), threading.Event()

    def script() -> None:
        if asked.is_set():
            network.heard["b"] = replace(network.heard["b"], unheard=())
            if clock.now() > healed_for[0] + 1:
                healed.set()
        else:
            healed_for[0] = clock.now()

    def make(proposal: Proposal) -> ProposedGeneration:
        asked.set()
        assert healed.wait(60)
        assert [member.node for member in proposal.members] == ["a", "b"]
        if not planned:
            raise RefusedError("no plan for them")
        record = Generation(
            number=proposal.number, attempt=0, members=list(proposal.members), plan=first.plan, reason=proposal.reason,
            store=StoreAddress(addr="127.0.0.1", port=1, node="a"),
        )  # fmt: skip
        return ProposedGeneration(record, plan, lambda: None)

    healed_for = [0.0]
    network, workers, store = Network(clock, script), Workers(), GenerationStore(tmp_path / "generations")
    network.heard["b"] = replace(network.heard["b"], unheard=(2,))
    network.is_over = lambda: workers.starts > 0
    first = store.newest()
    assert first is not None
    fakes: dict[str, Any] = {"peers": network, "group": workers}
    agent = Agent(
        AgentIdentity("a", NODES, "127.0.0.1", "a", 0, tmp_path), DecisionLimits(), source=Source(make, plan),
        context=AgentContext(EventLog(tmp_path / "events.jsonl", "a", 0, clock), clock, lambda: None), **fakes,
    )  # fmt: skip
    assert agent.run() == (0 if planned else RefusedError.exit_code)
    events = {event.kind: event for event in read_events(tmp_path / "events.jsonl")}
    assert "node_lost" not in events
    if planned:
        told: Event = events["node_left_out"]
        assert (told.data["node"], told.reason) == ("c", "c is left out: it and b do not hear each other")
    else:
        assert (events["failed"].data["left"], events["failed"].data["left_out"]) == (["a", "b"], ["c"])


def test_a_file_system_that_fails_while_the_first_record_is_made_ends_the_attempt_by_an_error(tmp_path: Path) -> None:
    (tmp_path / "planned").mkdir()
    plan, clock = first_generation(tmp_path / "planned"), FakeClock()

    def make(_: Proposal) -> ProposedGeneration:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "generations"))

    fakes: dict[str, Any] = {"peers": Network(clock, lambda: None), "group": Workers()}
    agent = Agent(
        AgentIdentity("a", NODES, "127.0.0.1", "a", 0, tmp_path), DecisionLimits(), source=Source(make, plan),
        context=AgentContext(EventLog(tmp_path / "events.jsonl", "a", 0, clock), clock, lambda: None), **fakes,
    )  # fmt: skip
    assert agent.run() == StorageError.exit_code
    (failed,) = (event for event in read_events(tmp_path / "events.jsonl") if event.kind == "failed")
    assert failed.reason == f"{tmp_path}/generations: Read-only file system, so generation 0 cannot be made"


def test_an_untrusted_plan_fails_the_run_with_one_line_and_does_not_crash_the_agent(tmp_path: Path) -> None:
    plan, clock = first_generation(tmp_path), FakeClock()
    error = UntrustedError(tmp_path / "plan.json", "can be written by others", "chmod go-w plan.json")
    was_read = threading.Event()

    class Untrusted(Source):
        def plan_of(self, record: Generation) -> Plan:
            was_read.set()
            raise error

    def make(_: Proposal) -> ProposedGeneration:
        # The agent proposes a record until it has found the published one, and does not read a plan that it made.
        assert was_read.wait(60)
        raise error

    network = Network(clock, lambda: None)
    network.is_over = lambda: False
    fakes: dict[str, Any] = {"peers": network, "group": Workers()}
    agent = Agent(
        AgentIdentity("a", NODES, "127.0.0.1", "a", 0, tmp_path), DecisionLimits(), source=Untrusted(make, plan),
        context=AgentContext(EventLog(tmp_path / "events.jsonl", "a", 0, clock), clock, lambda: None), **fakes,
    )  # fmt: skip
    assert agent.run() == UntrustedError.exit_code
    (failed,) = (event for event in read_events(tmp_path / "events.jsonl") if event.kind == "failed")
    assert failed.reason == str(error)


def state(rank: int) -> HeldState:
    return HeldState(generation=0, plan_sha256="ab" * 32, rank=rank, step=7, size_bytes=1)


class Memory:
    """Memory that holds a state of rank 0 once a generation with this node's workers has begun."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def orders(self, record: Generation, plan: Plan, ranks: Sequence[int]) -> dict[int, MemoryOrder]:
        self.said.append(("orders", record.number, record.memory and record.memory.step))
        return {rank: MemoryOrder(live=10 + record.number, source=record.memory, segments=()) for rank in ranks}

    def ready(self, rank: int) -> None:
        self.said.append(("ready", rank))

    def held(self) -> tuple[HeldState, ...]:
        return (state(0),)

    def close(self) -> None:
        self.said.append("close")


class TrainingWorkers(Workers):
    """Workers of which the first has made nine steps before the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[list[StartOrder]] = []
        self._news: list[object] = []

    def start(self, now: float, orders: Any, store: object, logs: object) -> None:
        super().start(now, orders, store, logs)
        self.orders.append(list(orders))
        if self.starts == 1:
            self._news = [WorkerUpdate(0, WorkerReady(step=0)), WorkerUpdate(0, StepDone(step=9, loss=1.0))]

    def news(self, now: float) -> list[object]:
        news, self._news = self._news, []
        return news


def test_promises_tell_what_each_node_holds_and_workers_get_memory(tmp_path: Path) -> None:
    plan = first_generation(tmp_path)
    clock = FakeClock()
    first = GenerationStore(tmp_path / "generations").newest()
    assert first is not None
    told: list[Proposal] = []
    source = MemorySource(generation=0, plan=first.plan, step=7, continued=[0], holders=[StateHolder(rank=0, node="a")])

    def make(proposal: Proposal) -> ProposedGeneration:
        told.append(proposal)
        record = Generation(
            number=proposal.number, attempt=0, members=list(proposal.members), plan=first.plan, reason=proposal.reason,
            store=StoreAddress(addr="127.0.0.1", port=1, node="a"), memory=source,
        )  # fmt: skip
        return ProposedGeneration(record, plan, lambda: None)

    network, workers, memory = Network(clock, lambda: None), TrainingWorkers(), Memory()
    network.is_over = lambda: workers.starts > 0
    network.held = {"b": (state(1), state(2))}
    fakes: dict[str, Any] = {"peers": network, "group": workers}
    log = EventLog(tmp_path / "events.jsonl", "a", 0, clock)
    agent = Agent(
        AgentIdentity("a", NODES, "127.0.0.1", "a", 0, tmp_path), DecisionLimits(), source=Source(make, plan),
        context=AgentContext(log, clock, lambda: None, memory=memory), **fakes,
    )  # fmt: skip
    assert agent.run() == 0
    assert {node: tuple(states) for node, states in told[-1].held.items()} == {
        "a": (state(0),), "b": (state(1), state(2)), "c": (),
    }  # fmt: skip
    number = first.number
    assert memory.said == [("orders", number, None), ("ready", 0), ("orders", number + 1, 7), "close"]
    assert [[order.memory and order.memory.live for order in orders] for orders in workers.orders] == [
        [10 + number], [11 + number],
    ]  # fmt: skip
    assert workers.orders[1][0].memory is not None
    assert workers.orders[1][0].memory.source == source
    started = [event for event in read_events(tmp_path / "events.jsonl") if event.kind == "generation_started"][-1]
    assert started.data["memory"] == {"generation": 0, "step": 7, "in_place": True}
    assert (started.data["restore_step"], started.data["lost_steps"]) == (7, 2)


def test_an_agent_promises_and_votes_only_once_no_worker_of_its_own_runs(tmp_path: Path) -> None:
    members = [Member(node=node, incarnation=node, addr="127.0.0.1", store_port=1) for node in NODES]
    store = StoreAddress(addr="127.0.0.1", port=1, node="a")
    first = Generation(number=0, attempt=0, members=members, plan="p.json", store=store, reason="start")
    sent: list[AgreementMessage] = []
    routes: Any = SimpleNamespace(send=lambda _, message: sent.append(message), is_near=lambda _: True)
    ended = [False]

    def begin(*_: object) -> Any:
        raise AssertionError("an acceptor uses no files")

    agreement = Agreement(
        members[1], 0, routes, GenerationStore(tmp_path), begin, lambda _: ended[0],
        lambda: (state(1),),
    )  # fmt: skip
    agreement.enter(0.0, first)
    ballot: dict[str, Any] = {"number": 1, "round": 1, "proposer": "a"}
    second = first.model_copy(update={"number": 1})
    requests = [Prepare(**ballot, reason="a worker died"), AcceptRequest(**ballot, record=second)]
    for request in requests:
        agreement.receive(1.0, "a", request)
    assert sent == []
    ended[0] = True
    for request in requests:
        agreement.receive(2.0, "a", request)
    assert [type(message) for message in sent] == [Promise, Accepted]
