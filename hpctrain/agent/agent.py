"""The agent's loop: collect what has happened, decide (`agent/decide.py`), and carry the decision out (`Agent`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from hpctrain.agent.agreement_messages import REASON_CHARS
from hpctrain.agent.decide import FOR_NEW_PLAN, CutOffPatience, Decision, decide
from hpctrain.agent.event_log import crash_message
from hpctrain.agent.generation_store import GenerationSource, GenerationStore, PlanAdviser
from hpctrain.agent.group import WorkerGroup, WorkerUpdate, event_of
from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.next_generation import AgentContext, AgentIdentity, NextGeneration, PlanAdvice, ProposalFailure
from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.peers import PeerMesh, ReachabilityTracker
from hpctrain.agent.start_files import StartFiles, StartPreparation
from hpctrain.agent.view import AgentView, DecisionLimits, PeerView, Phase, WorkerView
from hpctrain.agent.worker_messages import (
    ChangePlanOrder,
    MemoryOrder,
    StartOrder,
    StepDone,
    StopOrder,
    StoreConnection,
    WeightsHash,
    WorkerError,
    WorkerReady,
)
from hpctrain.base.errors import StorageError
from hpctrain.base.helper_thread import HelperThread, in_background
from hpctrain.base.net.wire import LineChannel
from hpctrain.records.history.fault import CHECKPOINT_DAMAGED
from hpctrain.records.history.generation import GENERATIONS, Generation, Member

TICK_S = 0.1
"""Longest time, in seconds, for which the loop waits between two turns."""
LINGER_S = 5.0
"""Longest time, in seconds, for which an agent stays when its part in the attempt is over."""


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
        store: GenerationStore | None = None,
    ) -> None:
        self._place = place
        self._limits = limits
        self._peers = peers
        self._group = group
        self._source = source
        self._event_log = context.event_log
        self._clock = context.clock
        self._context = context
        self._memory = context.memory
        self._state = AgentView(place.node, place.nodes, "joining", context.clock.now(), incarnation=place.incarnation)
        threads = in_background(context.making, peers.wake), in_background(context.files, peers.wake)
        self._in_files = threads[1]
        self._skipping: Future[None] | None = None
        self._next = NextGeneration(
            place, peers, source, store or GenerationStore(place.folder / GENERATIONS), context.event_log,
            threads, self._end_for_agreement, context.memory.held if context.memory is not None else tuple,
        )  # fmt: skip
        self._plan_advice = PlanAdvice(_question(context.adviser, peers.wake))
        self._starting = StartPreparation(place.node, source, group, threads[1])
        self._stop_logged = False
        self._fault_at: float | None = None
        self._last_step: dict[str, float] = {}
        self._weights: dict[str, str] = {}
        self._places: Sequence[str] = []
        self._patience = CutOffPatience.in_tree(limits) if not peers.hears_all else CutOffPatience(0.0)
        self._reachability = ReachabilityTracker(place.node, place.nodes if peers.hears_all else (), limits)
        self._announced_unheard: tuple[int, ...] = ()
        self._lost: frozenset[str] = frozenset()
        self._watched: list[LineChannel] = []
        self._store_socket: socket.socket | None = None
        self._exit_code: int | None = None
        self._leave_at = 0.0

    @property
    def record(self) -> Generation | None:
        """The generation that this agent has entered last; None before the first one."""
        return self._state.record

    def run(self) -> int:
        """Take part in the attempt until the run is done, stopped or failed, or this agent is cut off from the
        others; then end all workers and return the exit code. An HpctrainError or OSError means that the agent could
        not start or go on. An agent that had started tells the others before it raises the error."""
        self.start()
        try:
            while (code := self.turn()) is None:
                self._peers.wait(TICK_S)
            return code
        except Exception as error:
            self._crash(error)
            raise
        finally:
            self.close()

    def start(self) -> None:
        """Open the connections to the other agents. The caller then calls `turn` again and again. The errors are those
        of `NextGeneration.open` and `PeerMesh.open`."""
        self._next.open()
        self._store_socket = self._context.listen(self._place.addr)
        self._peers.open()

    def close(self) -> None:
        """End all workers, close all connections, and give up the memory for the workers' state."""
        self._end_workers()
        for thread in (self._context.making, self._context.files):
            thread.shutdown(wait=False, cancel_futures=True)
        self._peers.close()
        if self._store_socket is not None:
            self._store_socket.close()
        if self._memory is not None:
            self._memory.close()

    def turn(self) -> int | None:
        """Take in messages, decide and act, once; wait only for killed workers, up to `KILL_WAIT_S`. Return the exit
        code once the agent may leave, else None. The errors are those of `run`."""
        if self._exit_code is None:
            self._exit_code = self._turn()
            self._leave_at = self._clock.now() + LINGER_S
        return None if self._exit_code is None else self._linger(self._exit_code)

    def _turn(self) -> int | None:
        now = self._clock.now()
        announcement = self._announcement()
        # Sent at once, because the next generation waits until all agree on who is gone.
        news_of_loss = self._state.phase == "fault" and announcement.unheard != self._announced_unheard
        self._announced_unheard = announcement.unheard
        self._peers.exchange(now, announcement, at_once=news_of_loss)
        self._reachability.note(now, self._peers.views())
        self._report_losses()
        for news in self._group.news(now):
            self._apply_update(now, news)
        self._pass_on_orders()
        self._next.receive(now)
        try:
            self._next.publish(now)
        except StorageError as error:
            return self._fail(Decision("fail", str(error), exit_code=error.exit_code))
        if (decided := self._next.decided(now, between=self._state.phase in ("joining", "fault"))) is not None:
            self._adopt(decided)
        elif isinstance(files := self._starting.poll(now), Decision):
            return self._fail(files)
        elif files is not None:
            self._start_workers(now, files)
        if self._skipping is not None:
            if not self._skipping.done():
                return None
            skipping, self._skipping = self._skipping, None
            skipping.result()
        decision = decide(now, self._view(), self._limits)
        return self._act(now, decision) if self._patience.is_over(now, decision) else None

    def _report_losses(self) -> None:
        if self._context.peer_lost is None:
            return
        taking_part = ("joining", "running", "fault")
        lost = frozenset(view.node for view in self._peers.views() if view.lost and view.phase in taking_part)
        for node in lost - self._lost:
            self._context.files.submit(self._context.peer_lost, node)
        self._lost = lost

    def _act(self, now: float, decision: Decision) -> int | None:
        if decision.act == "end_generation":
            if decision.hung is not None:
                self._event_log.write("worker_hung", self._next.number, decision.reason, hung=decision.hung)
            self._end_generation(decision.reason)
        elif decision.act == "propose":
            return self._propose(now, decision)
        elif decision.act == "finish":
            self._enter("done", decision.reason)
            if self._holds_rank0():
                self._event_log.write(
                    "finished", self._next.number, decision.reason, **self._last_step, **self._weights
                )
            return 0
        elif decision.act == "stop":
            self._end_workers()
            self._enter("stopped", decision.reason)
            return decision.exit_code
        elif decision.act == "fail":
            return self._fail(decision)
        return None

    def _end_generation(self, reason: str) -> None:
        self._fault_at = None if reason == FOR_NEW_PLAN else self._clock.now()
        self._end_workers()
        self._enter("fault", reason)

    def _end_for_agreement(self, reason: str) -> bool:
        """End the running generation, if there is one, because this agent is about to vote on the next one. Return
        whether no worker runs any more."""
        if self._state.phase == "running":
            self._end_generation(reason)
        return self._group.kill()

    def _propose(self, now: float, decision: Decision) -> int | None:
        """Go on proposing the next generation. Return the exit code if no generation can be made, else None."""
        agents: list[Announcement | PeerView] = [self._announcement(), *self._peers.views()]
        known = {agent.node: _member(agent) for agent in agents}
        try:
            members = tuple(known[node] for node in decision.members)
            self._next.propose(now, decision, members)
        except ProposalFailure as failure:
            return self._fail(failure.decision)
        return None

    def _adopt(self, record: Generation) -> None:
        """Enter a generation that the agents agreed on: end this node's workers, and begin to get the files that the
        workers of the new generation need."""
        if self._state.phase == "running":
            self._fault_at = self._clock.now()
        self._end_workers()
        self._stop_logged = False
        self._plan_advice.forget()
        plan = self._next.enter(self._clock.now(), record, int(self._last_step.get("step", 0)))
        # Until the plan is read, any member may hold ranks.
        members = tuple(member.node for member in record.members)
        self._state = replace(self._state, record=record, working=members)
        self._event_log.generation = record.number
        self._starting.begin(record, plan, self._is_member(record))
        self._enter("running", record.reason)

    def _start_workers(self, now: float, files: StartFiles) -> None:
        """Start this node's workers of the generation that it has entered."""
        record, plan = self._state.record, files.plan
        assert record is not None, "its files were asked for"
        self._next.note_start(record, plan, int(self._last_step.get("step", 0)))
        self._state = replace(self._state, working=tuple(plan.nodes))
        self._places = plan.ranks
        node_ranks = [rank for rank, device_id in enumerate(plan.ranks) if device_id.node == self._place.node]
        node_ranks = node_ranks if self._is_member(record) else []
        memory = self._memory.orders(record, plan, node_ranks) if self._memory is not None else {}
        orders = [self._order(record, rank, memory.get(rank)) for rank in node_ranks]
        serves = record.store.node == self._place.node and self._is_member(record)
        self._group.start(now, orders, self._store_socket if serves else None, files.logs)
        if serves:
            # The worker of rank 0 has inherited this socket. The next generation gets another port, so no late worker
            # connects to it.
            assert self._store_socket is not None, "run opened it"
            self._store_socket.close()
            self._store_socket = self._context.listen(self._place.addr)
        self._watched = self._group.channels()
        for channel in self._watched:
            self._peers.watch(channel)

    def _order(self, record: Generation, rank: int, memory: MemoryOrder | None) -> StartOrder:
        store = StoreConnection(addr=record.store.addr, port=record.store.port, secret=self._peers.store_secret(record))
        return StartOrder(
            plan=record.plan, rank=rank, generation=record.number, store=store, restore=record.restore, memory=memory
        )

    def _apply_update(self, now: float, news: WorkerUpdate) -> None:
        report = news.report
        if isinstance(report, WorkerReady) and self._memory is not None:
            self._memory.ready(news.rank)
        if isinstance(report, WorkerError) and report.fault == CHECKPOINT_DAMAGED and self._state.record is not None:
            # Before any agent learns that the generation has ended, so that the next one takes an older checkpoint.
            self._skipping = self._in_files(self._source.skip_checkpoint, self._state.record, report.details.message)
        if isinstance(report, StepDone):
            self._last_step = {"step": report.step, "loss": report.loss}
            if news.rank == 0 and self._state.record is not None:
                self._plan_advice.note_step(self._state.record, report.step)
            if news.rank == 0 and self._fault_at is not None:
                self._event_log.write(
                    "recovered", self._next.number, f"step {report.step} is done", seconds=now - self._fault_at,
                    step=report.step,
                )  # fmt: skip
                self._fault_at = None
        elif isinstance(report, WeightsHash) and news.rank == 0:
            self._weights = {"weights_sha256": report.sha256}
        event = event_of(self._place.node, news)
        if event is not None:
            self._event_log.write(event[0], self._next.number, event[1], **event[2])

    def _fail(self, decision: Decision) -> int:
        self._end_workers()
        ending = {"failed", "cut_off"} if decision.cut_off else {"failed"}
        is_first = all(view.phase not in ending for view in self._peers.views())
        self._enter("cut_off" if decision.cut_off else "failed", decision.reason)
        if is_first:
            data: dict[str, object] = {"left": list(decision.members)} if decision.members else {}
            data |= {"left_out": list(decision.left_out)} if decision.left_out else {}
            if (failure := decision.failure) is not None:
                data |= {"node": self._place.node, "device": self._places[failure.rank], **failure.to_event()}
            self._event_log.write("failed", self._next.number, decision.reason, exit_code=decision.exit_code, **data)
        return decision.exit_code

    def _crash(self, error: Exception) -> None:
        """Tell the other agents, if possible, which error ends this agent, so that none takes its node for lost."""
        with contextlib.suppress(Exception):
            self._end_workers()
        with contextlib.suppress(Exception):
            self._enter("crashed", crash_message(self._place.node, error))

    def _pass_on_orders(self) -> None:
        if self._state.phase != "running" or self._stop_logged:
            return
        if (change := self._plan_advice.order()) is not None:
            self._group.order(change)
        if (asked_by := self._context.stop_wanted()) is not None:
            self._stop_logged = True
            if self._holds_rank0():
                reason = f"asked to stop by {asked_by}; a checkpoint is saved first"
                self._event_log.write("preempted", self._next.number, reason, asked_by=asked_by)
            self._group.order(StopOrder())

    def _end_workers(self) -> None:
        self._starting.cancel()
        for channel in self._watched:
            self._peers.unwatch(channel)
        self._watched = []
        self._group.kill()

    def _enter(self, phase: Phase, reason: str) -> None:
        self._state = replace(self._state, phase=phase, reason=reason, phase_since=self._clock.now())
        self._peers.exchange(self._state.phase_since, self._announcement(), at_once=True)

    def _linger(self, code: int) -> int | None:
        """Stay reachable until the other agents also know that the run ends, so that none takes this node for lost, and
        until all records are published, because the next attempt knows only these. Return `code` then, or after
        `LINGER_S`; else None."""
        self._peers.exchange(self._clock.now(), self._announcement())
        self._peers.take_messages()
        over = ("done", "stopped", "failed", "cut_off")
        informed = all(not view.connected or view.phase in over for view in self._peers.views())
        published = False
        with contextlib.suppress(StorageError):  # the copy of a plan, which no attempt needs
            published = self._next.publish(self._clock.now())
        return code if (informed and published) or self._clock.now() >= self._leave_at else None

    def _view(self) -> AgentView:
        return replace(
            self._state,
            peers=self._peers.views(),
            workers=self._worker_view(),
            stop_wanted=self._context.stop_wanted() is not None,
            silent=self._reachability.silent,
        )

    def _worker_view(self) -> WorkerView:
        if self._state.phase == "running" and self._starting.is_pending:
            # Before they start, workers count as hanging after the same time.
            return WorkerView(1, last_progress=self._state.phase_since, waits_for_files=True)
        return replace(self._group.view(), doing=self._doing())

    def _announcement(self) -> Announcement:
        assert self._store_socket is not None, "run opened it"
        place, store_port = self._place, self._store_socket.getsockname()[1]
        unheard = self._reachability.unheard(self._clock.now(), self._peers.views())
        return Announcement(
            node=place.node, incarnation=place.incarnation, addr=place.addr, store_port=store_port,
            generation=self._next.number, phase=self._state.phase, reason=self._state.reason[:REASON_CHARS],
            doing=self._doing(), unheard=unheard,
        )  # fmt: skip

    def _doing(self) -> tuple[WorkerActivity, ...]:
        """Return the activity of this node's workers, if they have made no step for half of the progress timeout;
        else (). So every agent knows the activity of all ranks when the timeout is over."""
        silent_s = self._clock.now() - self._group.view().last_progress
        if self._state.phase != "running" or silent_s < self._limits.recovery.progress_timeout_s / 2:
            return ()
        return self._group.doing(self._places)

    def _is_member(self, record: Generation) -> bool:
        return any(m.node == self._place.node and m.incarnation == self._place.incarnation for m in record.members)

    def _holds_rank0(self) -> bool:
        return self._state.record is not None and self._state.record.store.node == self._place.node


def _question(
    adviser: PlanAdviser | None, wake: Callable[[], None]
) -> Callable[[Generation, int], Future[ChangePlanOrder | None]] | None:
    """Return a function that asks the adviser in a thread of its own, and then calls `wake`; None without an
    adviser."""
    return None if adviser is None else partial(in_background(HelperThread("adviser"), wake), adviser.advise)


def _member(agent: Announcement | PeerView) -> Member:
    return Member(node=agent.node, incarnation=agent.incarnation, addr=agent.addr, store_port=agent.store_port)
