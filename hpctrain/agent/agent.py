"""The agent's loop: collect what has happened, decide (`agent/decide.py`), and carry the decision out (`Agent`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.agent.decide import Decision, decide, failures
from hpctrain.agent.event_log import EventLog, crash_message
from hpctrain.agent.generation_store import GenerationSource, GenerationStore, Proposal, ProposedGeneration
from hpctrain.agent.group import WorkerGroup, WorkerUpdate, event_of
from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.peers import Announcement, PeerMesh, ReachabilityTracker
from hpctrain.agent.view import AgentView, DecisionLimits, PeerView, Phase
from hpctrain.agent.worker_messages import StartOrder, StepDone, StoreConnection, WeightsHash
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.net.wire import LineChannel
from hpctrain.records.history.generation import GENERATIONS, Generation, Member
from hpctrain.records.plan.plan import Plan

TICK_S = 0.1
"""Longest time between two decisions, in seconds."""
LINGER_S = 5.0


@dataclass(frozen=True)
class AgentIdentity:
    """Who this agent is: node, address, incarnation, attempt and run folder."""

    node: str
    nodes: tuple[str, ...]
    """All nodes of the allocation, in order."""
    addr: str
    """Address at which other nodes reach this node."""
    incarnation: str
    attempt: int
    folder: Path


@dataclass(frozen=True)
class AgentContext:
    """What an agent gets from its process: the log of events, the clock, and who asked the node to stop."""

    event_log: EventLog
    clock: Clock
    stop_wanted: Callable[[], str | None]
    """Returns who asked this node to save and stop; None if nobody did."""


class Agent:
    """One node's agent during one attempt of a run: it starts and watches the node's workers."""

    def __init__(
        self,
        place: AgentIdentity,
        limits: DecisionLimits,
        peers: PeerMesh,
        group: WorkerGroup,
        source: GenerationSource,
        context: AgentContext,
    ) -> None:
        self._place = place
        self._limits = limits
        self._peers = peers
        self._group = group
        self._source = source
        self._event_log = context.event_log
        self._clock = context.clock
        self._stop_wanted = context.stop_wanted
        self._store = GenerationStore(place.folder / GENERATIONS)
        self._store_secret = peers.store_secret
        self._state = AgentView(place.node, place.nodes, "joining", context.clock.now())
        self._first_number = 0
        self._stop_logged = False
        self._fault_at: float | None = None
        self._last_step: dict[str, float] = {}
        self._weights: dict[str, str] = {}
        self._places: Sequence[str] = []
        self._reachability = ReachabilityTracker(place.node, place.nodes, limits)
        self._announced_unheard: tuple[int, ...] = ()
        self._watched: list[LineChannel] = []
        self._store_socket: socket.socket | None = None
        self._making: tuple[Future[ProposedGeneration], Decision] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proposal")

    def run(self) -> int:
        """Take part in the attempt until the run is done, stopped or failed. End all workers; return the exit code."""
        last = self._store.newest()
        # Generation numbers continue over attempts, and those of earlier attempts are over. A generation that this
        # attempt decided before this agent joined is entered as a spectator; the next generation includes the agent.
        self._first_number = 0 if last is None else last.number + (last.attempt != self._place.attempt)
        self._store_socket = socket.create_server((self._place.addr, 0))
        self._peers.open()
        try:
            while True:
                code = self._turn()
                if code is not None:
                    self._linger()
                    return code
                self._peers.wait(TICK_S)
        except Exception as error:
            self._crash(error)
            raise
        finally:
            self._end_workers()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._peers.close()
            self._store_socket.close()

    def _turn(self) -> int | None:
        now = self._clock.now()
        announcement = self._announcement()
        # Sent at once, because the next generation waits until all agree on who is gone.
        news_of_loss = self._state.phase == "fault" and announcement.unheard != self._announced_unheard
        self._announced_unheard = announcement.unheard
        self._peers.exchange(now, announcement, at_once=news_of_loss)
        self._reachability.note(now, self._peers.views())
        for news in self._group.news(now):
            self._apply_update(now, news)
        self._pass_on_stop()
        decided = self._decided_elsewhere()
        if decided is not None:
            self._adopt(decided)
            return None
        return self._act(now, decide(now, self._view(), self._limits))

    def _act(self, now: float, decision: Decision) -> int | None:
        if decision.act == "end_generation":
            self._fault_at = now
            if decision.hung is not None:
                self._event_log.write("worker_hung", self._number(), decision.reason, hung=decision.hung)
            self._end_workers()
            self._enter("fault", decision.reason)
        elif decision.act == "propose":
            return self._propose(decision)
        elif decision.act == "finish":
            self._enter("done", decision.reason)
            if self._holds_rank0():
                self._event_log.write("finished", self._number(), decision.reason, **self._last_step, **self._weights)
            return 0
        elif decision.act == "stop":
            self._end_workers()
            self._enter("stopped", decision.reason)
            return decision.exit_code
        elif decision.act == "fail":
            return self._fail(decision)
        return None

    def _propose(self, decision: Decision) -> int | None:
        """Make the record of the next generation and propose it. Return the exit code if no generation can be made,
        else None. A thread makes the record, because hashing a checkpoint may take longer than the heartbeat
        timeout."""
        if self._making is None:
            self._making = self._thread.submit(self._source.make, self._proposal(decision)), decision
        making, decision = self._making
        if not making.done():
            return None
        self._making = None
        try:
            proposed = making.result()
            record = self._store.decide(proposed.record)
            if record == proposed.record:
                self._note_members(record, decision.left_out)
                proposed.announce()
                self._note_start(record, proposed.plan)
        except HpctrainError as error:
            # No plan for the remaining nodes, or no disk space to write it: no other agent would succeed.
            return self._fail(replace(decision, reason=str(error), exit_code=error.exit_code))
        self._adopt(record)
        return None

    def _proposal(self, decision: Decision) -> Proposal:
        agents: list[Announcement | PeerView] = [self._announcement(), *self._peers.views()]
        known = {agent.node: _member(agent) for agent in agents}
        return Proposal(
            number=self._number() + 1,
            attempt=self._place.attempt,
            members=tuple(known[node] for node in decision.members),
            previous=self._state.record or self._store.newest(),
            reason=decision.reason,
            failures=failures(self._view()),
            proposer=self._place.incarnation,
        )

    def _adopt(self, record: Generation) -> None:
        """Enter a generation that the agents agreed on: end this node's workers, and start those of the new one."""
        if self._state.phase == "running":
            self._fault_at = self._clock.now()
        self._end_workers()
        self._stop_logged = False
        self._making = None
        plan = Plan.read(self._place.folder / record.plan, owned=True)
        self._state = replace(self._state, record=record, working=tuple(plan.nodes))
        self._places = plan.ranks
        node_ranks = [rank for rank, device_id in enumerate(plan.ranks) if device_id.node == self._place.node]
        orders = [self._order(record, rank) for rank in node_ranks]
        serves = record.store.node == self._place.node and self._is_member(record)
        if self._is_member(record):
            self._group.start(self._clock.now(), orders, self._store_socket if serves else None)
        if serves:
            # The worker has inherited it. The next generation gets another port, so no late worker connects to it.
            assert self._store_socket is not None, "run opened it"
            self._store_socket.close()
            self._store_socket = socket.create_server((self._place.addr, 0))
        self._watched = self._group.channels()
        for channel in self._watched:
            self._peers.watch(channel)
        self._enter("running", record.reason)

    def _order(self, record: Generation, rank: int) -> StartOrder:
        store = StoreConnection(addr=record.store.addr, port=record.store.port, secret=self._store_secret(record))
        return StartOrder(plan=record.plan, rank=rank, generation=record.number, store=store, restore=record.restore)

    def _apply_update(self, now: float, news: WorkerUpdate) -> None:
        report = news.report
        if isinstance(report, StepDone):
            self._last_step = {"step": report.step, "loss": report.loss}
            if news.rank == 0 and self._fault_at is not None:
                self._event_log.write(
                    "recovered", self._number(), f"step {report.step} is done", seconds=now - self._fault_at,
                    step=report.step,
                )  # fmt: skip
                self._fault_at = None
        elif isinstance(report, WeightsHash) and news.rank == 0:
            self._weights = {"weights_sha256": report.sha256}
        event = event_of(self._place.node, news)
        if event is not None:
            self._event_log.write(event[0], self._number(), event[1], **event[2])

    def _note_start(self, record: Generation, plan: Plan) -> None:
        """Write the event that a generation proposed by this agent has started."""
        data = {name: getattr(record, name) for name in ("plan", "restore", "first_weights")}
        members = [member.node for member in record.members]
        self._event_log.write(
            "generation_started", record.number, record.reason, members=members, **data, pp=plan.pp, dp=plan.dp,
            tp=plan.tp,
        )  # fmt: skip

    def _note_members(self, record: Generation, left_out: Mapping[str, str]) -> None:
        """Write an event for each node that has left or come back since the previous generation.

        Args:
            record: the next generation.
            left_out: living node that is no member of the next generation -> the reason.
        """
        last = self._state.record
        before = set(self._place.nodes) if last is None else {member.node for member in last.members}
        now = {member.node for member in record.members}
        crashed = {view.node: view.reason for view in self._peers.views() if view.phase == "crashed"}
        for node in sorted(before - now):
            if node in left_out:
                self._event_log.write("node_left_out", record.number, left_out[node], node=node)
            elif last is not None:
                known = {"crashed": True} if node in crashed else {}
                reason = crashed.get(node, f"node {node} is gone")
                self._event_log.write("node_lost", self._number(), reason, node=node, **known)
        for node in sorted(now - before):
            self._event_log.write("node_returned", self._number(), f"node {node} is back", node=node)

    def _fail(self, decision: Decision) -> int:
        self._end_workers()
        is_first = all(view.phase != "failed" for view in self._peers.views())
        self._enter("failed", decision.reason)
        if is_first:
            data: dict[str, object] = {"left": list(decision.members)} if decision.members else {}
            data |= {"left_out": list(decision.left_out)} if decision.left_out else {}
            if (failure := decision.failure) is not None:
                data |= {"node": self._place.node, "device": self._places[failure.rank], **failure.to_event()}
            self._event_log.write("failed", self._number(), decision.reason, exit_code=decision.exit_code, **data)
        return decision.exit_code

    def _crash(self, error: Exception) -> None:
        """Tell the other agents, if possible, which error ends this agent, so that none takes its node for lost."""
        with contextlib.suppress(Exception):
            self._end_workers()
        with contextlib.suppress(Exception):
            self._enter("crashed", crash_message(self._place.node, error))

    def _pass_on_stop(self) -> None:
        if self._state.phase == "running" and not self._stop_logged and (asked_by := self._stop_wanted()) is not None:
            self._stop_logged = True
            if self._holds_rank0():
                reason = f"asked to stop by {asked_by}; a checkpoint is saved first"
                self._event_log.write("preempted", self._number(), reason, asked_by=asked_by)
            self._group.stop()

    def _decided_elsewhere(self) -> Generation | None:
        """Return a generation that another agent proposed and that this agent has to enter; None if there is none."""
        ahead = any(view.generation > self._number() for view in self._peers.views())
        if self._state.phase not in ("joining", "fault") and not ahead:
            return None
        newest = self._store.newest()
        if newest is None or newest.number <= self._number() or newest.number < self._first_number:
            return None
        return newest if newest.attempt == self._place.attempt else None

    def _end_workers(self) -> None:
        for channel in self._watched:
            self._peers.unwatch(channel)
        self._watched = []
        self._group.kill()

    def _enter(self, phase: Phase, reason: str) -> None:
        self._state = replace(self._state, phase=phase, reason=reason, phase_since=self._clock.now())
        self._peers.exchange(self._state.phase_since, self._announcement(), at_once=True)

    def _linger(self) -> None:
        """Stay reachable until the other agents also know that the run ends, so that none takes this node for lost."""
        deadline = self._clock.now() + LINGER_S
        while self._clock.now() < deadline:
            self._peers.exchange(self._clock.now(), self._announcement())
            if all(not view.connected or view.phase in ("done", "stopped", "failed") for view in self._peers.views()):
                return
            self._peers.wait(TICK_S)

    def _view(self) -> AgentView:
        between = self._state.phase in ("joining", "fault")
        return replace(
            self._state,
            peers=self._peers.views(),
            workers=replace(self._group.view(), doing=self._doing()),
            stop_wanted=self._stop_wanted() is not None,
            checkpoint=self._source.newest_checkpoint() if between else None,
            silent=self._reachability.silent,
        )

    def _announcement(self) -> Announcement:
        assert self._store_socket is not None, "run opened it"
        place, store_port = self._place, self._store_socket.getsockname()[1]
        unheard = self._reachability.unheard(self._clock.now(), self._peers.views())
        return Announcement(
            node=place.node, incarnation=place.incarnation, addr=place.addr, store_port=store_port,
            generation=self._number(), phase=self._state.phase, reason=self._state.reason, doing=self._doing(),
            unheard=unheard,
        )  # fmt: skip

    def _doing(self) -> tuple[WorkerActivity, ...]:
        """Return the activity of this node's workers, if they have made no step for half of the progress timeout;
        else (). So every agent knows the activity of all ranks when the timeout is over."""
        silent_s = self._clock.now() - self._group.view().last_progress
        if self._state.phase != "running" or silent_s < self._limits.recovery.progress_timeout_s / 2:
            return ()
        return self._group.doing(self._places)

    def _number(self) -> int:
        return self._state.record.number if self._state.record else self._first_number - 1

    def _is_member(self, record: Generation) -> bool:
        return any(m.node == self._place.node and m.incarnation == self._place.incarnation for m in record.members)

    def _holds_rank0(self) -> bool:
        return self._state.record is not None and self._state.record.store.node == self._place.node


def _member(agent: Announcement | PeerView) -> Member:
    return Member(node=agent.node, incarnation=agent.incarnation, addr=agent.addr, store_port=agent.store_port)
