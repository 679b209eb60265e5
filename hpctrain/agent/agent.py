"""The agent's loop: sense, decide, act. Decisions are in `decide`; this file only carries them out."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.agent.decide import Decision, Phase, Settings, View, decide, failures
from hpctrain.agent.group import WorkerGroup, WorkerNews
from hpctrain.agent.journal import Journal
from hpctrain.agent.peers import Announcement, Peers
from hpctrain.agent.store import GenerationStore
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.wire import LineChannel
from hpctrain.records.generation import Generation, Member
from hpctrain.records.plan import Plan

TICK_S = 0.1
LINGER_S = 5.0


@dataclass(frozen=True)
class Proposal:
    """What a proposer knows when it makes the next generation."""

    number: int
    attempt: int
    members: tuple[Member, ...]
    previous: Generation | None
    reason: str
    failures: int


@dataclass(frozen=True)
class Place:
    """Who and where this agent is."""

    node: str
    nodes: tuple[str, ...]
    addr: str
    incarnation: str
    attempt: int
    folder: Path


class Agent:
    """One node's agent for one attempt of a run."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        peers: Peers,
        store: GenerationStore,
        group: WorkerGroup,
        journal: Journal,
        clock: Clock,
        make_generation: Callable[[Proposal], Generation],
        newest_checkpoint: Callable[[], str | None],
        stop_wanted: Callable[[], bool],
    ) -> None:
        self._place = place
        self._settings = settings
        self._peers = peers
        self._store = store
        self._group = group
        self._journal = journal
        self._clock = clock
        self._make_generation = make_generation
        self._newest_checkpoint = newest_checkpoint
        self._stop_wanted = stop_wanted
        self._phase: Phase = "joining"
        self._phase_since = clock.now()
        self._reason = ""
        self._record: Generation | None = None
        self._first_number = 0
        self._stop_told = False
        self._fault_at: float | None = None
        self._last_step: dict[str, float] = {}
        self._watched: list[LineChannel] = []
        self._store_socket = socket.create_server((place.addr, 0))

    def run(self) -> int:
        """Take part until the run is done, stopped or failed; the exit code comes back. No worker outlives it."""
        last = self._store.newest()
        # Generations count on over attempts; what an earlier attempt decided is history, not our record.
        self._first_number = last.number + 1 if last else 0
        self._peers.open()
        try:
            while True:
                code = self._turn()
                if code is not None:
                    self._linger()
                    return code
                self._peers.wait(TICK_S)
        finally:
            self._end_workers()
            self._peers.close()
            self._store_socket.close()

    def _turn(self) -> int | None:
        now = self._clock.now()
        self._peers.exchange(now, self._announcement())
        for news in self._group.news(now):
            self._take_news(now, news)
        self._pass_on_stop()
        decided = self._decided_elsewhere()
        if decided is not None:
            self._adopt(decided)
            return None
        return self._act(now, decide(now, self._view(), self._settings))

    def _act(self, now: float, decision: Decision) -> int | None:
        if decision.act == "end_generation":
            self._fault_at = now
            self._end_workers()
            self._enter("fault", decision.reason)
        elif decision.act == "propose":
            return self._propose(decision)
        elif decision.act == "finish":
            self._enter("done", decision.reason)
            if self._holds_rank0():
                self._journal.write("finished", self._number(), decision.reason, **self._last_step)
            return 0
        elif decision.act == "stop":
            self._end_workers()
            self._enter("stopped", decision.reason)
            return decision.exit_code
        elif decision.act == "fail":
            return self._fail(decision.reason, decision.exit_code)
        return None

    def _propose(self, decision: Decision) -> int | None:
        known = {self._place.node: self._member()}
        for node in decision.members:
            said = self._peers.announcement(node)
            if said is not None:
                known[node] = Member(
                    node=node, incarnation=said.incarnation, addr=said.addr, store_port=said.store_port
                )
        members = tuple(known[node] for node in decision.members)
        self._note_losses(decision.members)
        proposal = Proposal(
            self._number() + 1 if self._record else self._first_number,
            self._place.attempt,
            members,
            self._record or self._store.newest(),
            decision.reason,
            failures(self._view()),
        )
        try:
            record = self._store.decide(self._make_generation(proposal))
        except HpctrainError as error:
            # No plan for what is left, or no room to write it down: nobody else would fare better.
            return self._fail(str(error), error.exit_code)
        if record.members == list(members) and record.reason == decision.reason:
            self._journal.write(
                "generation_started",
                record.number,
                record.reason,
                members=[member.node for member in record.members],
                plan=record.plan,
                restore=record.restore,
                **_degrees(self._place.folder, record),
            )
        self._adopt(record)
        return None

    def _adopt(self, record: Generation) -> None:
        """Enter a decided generation: end what is left of the old one, start this node's workers of the new one."""
        self._end_workers()
        self._record = record
        self._stop_told = False
        plan = Plan.read(self._place.folder / record.plan)
        mine = [rank for rank, place in enumerate(plan.ranks) if place.partition(":")[0] == self._place.node]
        orders = {rank: self._order(record, rank) for rank in mine}
        serves = record.store.node == self._place.node and self._is_member(record)
        if self._is_member(record):
            self._group.start(self._clock.now(), orders, self._store_socket if serves else None)
        if serves:
            # The worker holds it now; the next generation gets a fresh port: no late worker meets the wrong one.
            self._store_socket.close()
            self._store_socket = socket.create_server((self._place.addr, 0))
        self._watched = self._group.channels()
        for channel in self._watched:
            self._peers.watch(channel)
        self._enter("running", record.reason)

    def _order(self, record: Generation, rank: int) -> dict[str, object]:
        return {
            "plan": record.plan,
            "rank": rank,
            "generation": record.number,
            "store": {"addr": record.store.addr, "port": record.store.port},
            "restore": record.restore,
        }

    def _take_news(self, now: float, news: WorkerNews) -> None:
        kind = news.message.get("type")
        if kind == "step":
            self._last_step = {"step": news.message["step"], "loss": news.message["loss"]}
        if kind == "step" and news.rank == 0 and self._fault_at is not None:
            step = int(news.message["step"])
            self._journal.write(
                "recovered", self._number(), f"step {step} is done", seconds=now - self._fault_at, step=step
            )
            self._fault_at = None
        elif kind == "saved":
            self._note_saved(news)
        elif news.exit_code is not None and news.exit_code not in (0, 75, 76):
            how = f"signal {-news.exit_code}" if news.exit_code < 0 else f"exit code {news.exit_code}"
            data = {"signal": -news.exit_code} if news.exit_code < 0 else {"exit_code": news.exit_code}
            self._journal.write(
                "worker_died",
                self._number(),
                f"the worker of {self._place.node} (rank {news.rank}) ended by {how}",
                node=self._place.node,
                rank=news.rank,
                **data,
            )

    def _note_saved(self, news: WorkerNews) -> None:
        message = dict(news.message)
        step, error = message["step"], message.get("error")
        if error:
            self._journal.write("checkpoint_skipped", self._number(), f"step {step} not saved: {error}", step=step)
        else:
            self._journal.write(
                "checkpoint_saved",
                self._number(),
                f"step {step} is on disk",
                step=step,
                seconds=message["seconds"],
                size_bytes=message["size_bytes"],
            )

    def _note_losses(self, members: tuple[str, ...]) -> None:
        if self._record is None:
            return
        for member in self._record.members:
            if member.node not in members:
                self._journal.write("node_lost", self._record.number, f"node {member.node} is gone", node=member.node)
        known = {member.node for member in self._record.members}
        for node in members:
            if node not in known:
                self._journal.write("node_returned", self._record.number, f"node {node} is back", node=node)

    def _fail(self, reason: str, code: int) -> int:
        self._end_workers()
        told = any(view.phase == "failed" for view in self._peers.views())
        self._enter("failed", reason)
        if not told:
            self._journal.write("failed", self._number(), reason)
        return code

    def _pass_on_stop(self) -> None:
        if self._phase == "running" and not self._stop_told and self._stop_wanted():
            self._stop_told = True
            self._journal.write("preempted", self._number(), "asked to stop; a checkpoint is saved first")
            self._group.tell("stop")

    def _decided_elsewhere(self) -> Generation | None:
        """A generation decided by another agent that this one has to enter."""
        ahead = any(view.generation > self._number() for view in self._peers.views())
        if self._phase not in ("joining", "fault") and not ahead:
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
        self._phase, self._reason, self._phase_since = phase, reason, self._clock.now()
        self._peers.exchange(self._phase_since, self._announcement(), at_once=True)

    def _linger(self) -> None:
        """Stay reachable until the others know the end too, so that nobody takes a farewell for a loss."""
        deadline = self._clock.now() + LINGER_S
        while self._clock.now() < deadline:
            self._peers.exchange(self._clock.now(), self._announcement())
            if all(not view.connected or view.phase in ("done", "stopped", "failed") for view in self._peers.views()):
                return
            self._peers.wait(TICK_S)

    def _view(self) -> View:
        between = self._phase in ("joining", "fault")
        return View(
            me=self._place.node,
            nodes=self._place.nodes,
            phase=self._phase,
            phase_since=self._phase_since,
            reason=self._reason,
            record=self._record,
            peers=self._peers.views(),
            workers=self._group.view(),
            stop_wanted=self._stop_wanted(),
            checkpoint=self._newest_checkpoint() if between else None,
        )

    def _announcement(self) -> Announcement:
        member = self._member()
        return Announcement(
            member.node, member.incarnation, member.addr, member.store_port, self._number(), self._phase, self._reason
        )

    def _member(self) -> Member:
        return Member(
            node=self._place.node,
            incarnation=self._place.incarnation,
            addr=self._place.addr,
            store_port=self._store_socket.getsockname()[1],
        )

    def _number(self) -> int:
        return self._record.number if self._record else self._first_number - 1

    def _is_member(self, record: Generation) -> bool:
        return any(m.node == self._place.node and m.incarnation == self._place.incarnation for m in record.members)

    def _holds_rank0(self) -> bool:
        return self._record is not None and self._record.store.node == self._place.node


def _degrees(folder: Path, record: Generation) -> dict[str, int]:
    plan = Plan.read(folder / record.plan)
    return {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
