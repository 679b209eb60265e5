"""The coordinator of a probe: it orders the nodes to measure, one round at a time, over one connection to each node,
and sets a deadline for every answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.base.clock import Clock
from hpctrain.probe.measure.outcome import ContentionRound, PairResult, ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.measurement_schedule import measurement_schedule
from hpctrain.probe.pair_selection.rounds import Round
from hpctrain.probe.pair_selection.switches import PriorSwitches
from hpctrain.probe.protocol import messages
from hpctrain.probe.protocol.connections import ConnectionLost, Transport
from hpctrain.probe.protocol.messages import BackendReport, backend_lines, choose_backend

GRACE_S = 3.0
"""Seconds that the coordinator waits beyond a node's own deadline for a pair. In this time even a node on a busy
machine can report that its measurement failed."""

BACKEND_GRACE_S = 10.0
"""Seconds that the coordinator waits beyond the deadline of the measurement over the training backend. In this time a
node ends its measuring process, which may hang in a collective, and reports the failure."""

Wanted = TypeVar("Wanted", bound=messages.Answer)
MAX_SECOND_TRIES = 16
"""Most broken pairs that are measured once more, one at a time. A pair whose link is cut costs a whole deadline
again."""
Progress = Callable[[str, int, int], None]
"""Function called with (phase, done, planned). The phases are join, links, devices and backend. `done` and `planned`
count rounds in the phase links, and nodes in the other phases."""


class Coordinator:
    """The leader of a probe: sends orders to the nodes and collects their answers. A node that dies or hangs counts as
    lost from then on, and delays the probe by at most one deadline."""

    def __init__(
        self, transport: Transport, nodes: Sequence[str], clock: Clock, settings: ProbeSettings,
        progress: Progress | None = None, prior: PriorSwitches | None = None,
    ) -> None:  # fmt: skip
        """Prepare a probe of `nodes`.

        Args:
            progress: called as `Progress` says, between steps of the probe, when `outcome` is consistent.
            prior: the switches in the prior topology; None: there is no prior topology.
        """
        self._transport = transport
        self._clock = clock
        self.settings = settings
        self.progress = progress or (lambda phase, done, planned: None)
        self._start = clock.now()
        self.outcome = ProbeOutcome(list(nodes), prior=prior or {})

    def run(self) -> ProbeOutcome:
        """Run the whole probe (join, links, devices, messages over the training backend) and return its outcome."""
        self._gather()
        self._links()
        if self.settings.device != "none":
            self._devices()
            self._backend()
        self.outcome.wall_s = self._clock.now() - self._start
        return self.outcome

    def close(self) -> None:
        """Tell every node that the probe has ended, and close the connections."""
        for name in self.outcome.joined:
            self._transport.send(name, {"kind": "over"})
        self._transport.close()

    def _tell(self, phase: str, done: int, planned: int) -> None:
        self.outcome.wall_s = self._clock.now() - self._start
        self.progress(phase, done, planned)

    def _gather(self) -> None:
        expected = set(self.outcome.nodes)
        deadline = self._clock.now() + self.settings.join_deadline_s
        joined = self.outcome.joined
        while len(joined) < len(expected):
            self._tell("join", len(joined), len(expected))
            join = self._transport.admit(expected - set(joined), deadline)
            if join is None:
                break
            joined[join.node] = join
        for name in sorted(expected - set(joined)):
            self._lose(name, f"did not join within {self.settings.join_deadline_s:g} s")

    def _links(self) -> None:
        names, number = self.outcome.nodes, 0
        for step in measurement_schedule(self.outcome, self.settings):
            self.outcome.rounds_planned += len(step)
            for planned in step:
                self._tell("links", number, self.outcome.rounds_planned)
                number += 1
                alive = set(self.outcome.alive)
                pairs = [(names[a], names[b]) for a, b in planned.pairs if {names[a], names[b]} <= alive]
                if pairs and self._round(number, planned, pairs):
                    self.outcome.rounds_done += 1
        for a, b in self.outcome.unmeasured()[:MAX_SECOND_TRIES]:
            number += 1
            if {a, b} <= set(self.outcome.alive):
                self._round(number, Round(((names.index(a), names.index(b)),), alone=False), [(a, b)])
        self._tell("links", number, self.outcome.rounds_planned)

    def _round(self, number: int, planned: Round, pairs: list[tuple[str, str]]) -> bool:
        """Let the pairs of one round measure, and store their results. Return whether at least one pair was measured.

        Args:
            number: number of the round within the probe, by which late answers are recognised.
            planned: the round as the schedule has it.
            pairs: the round's pairs whose two nodes are alive.
        """
        for a, b in pairs:
            self._tell_pair(number, a, b)
        busy = {name for pair in pairs for name in pair}
        for name in set(self.outcome.alive) - busy:
            self._transport.send(name, {"kind": "idle"})
        waited_s = self.settings.slot_deadline_s + GRACE_S
        answers = self._collect(
            busy, messages.PairAnswer, waited_s, f"in round {number}", lambda answer: answer.round == number
        )
        results = [self._result(planned, len(pairs), pair, answers) for pair in pairs]
        measured = [result for result in results if result is not None]
        self._keep(planned, measured)
        return bool(measured)

    def _keep(self, planned: Round, measured: list[PairResult]) -> None:
        if planned.purpose == "contention":
            self.outcome.contention.append(ContentionRound(planned.alone, tuple(measured)))
        elif planned.purpose == "retest":
            self.outcome.retests += measured
        else:
            self.outcome.add(measured, self.settings.bulk_bytes)

    def _tell_pair(self, number: int, a: str, b: str) -> None:
        place = self.outcome.joined[b]
        self._transport.send(b, {"kind": "pair", "round": number, "caller": False, "peer": a})
        call = {"kind": "pair", "round": number, "caller": True, "peer": b, "addr": place.addr, "port": place.port}
        self._transport.send(a, call)

    def _result(
        self, planned: Round, concurrency: int, pair: tuple[str, str], answers: dict[str, messages.PairAnswer]
    ) -> PairResult | None:
        a, b = pair
        ends = [answers[name].figures for name in pair if name in answers]
        if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
            self.outcome.broken.pop(pair, None)
            self.outcome.broken.pop(pair[::-1], None)
            return PairResult(a, b, planned.alone, concurrency, ends[0], ends[1])
        if a not in self.outcome.lost and b not in self.outcome.lost:
            reasons = [f"{name}: {answers[name].error or 'no figures'}" for name in pair]
            self.outcome.broken[pair] = "; ".join(reasons)
        return None

    def _devices(self) -> None:
        """Let all nodes measure their devices: wait until every measuring process is ready, then start all at once.
        Store the reports."""
        limit_s = self.settings.devices_deadline_s
        alive = set(self.outcome.alive)
        self._tell("devices", 0, len(alive))
        for name in alive:
            self._transport.send(name, {"kind": "devices"})
        ready = self._collect(alive, (messages.Ready, messages.DevicesAnswer), limit_s, "while starting to measure")
        self._tell("devices", len(ready), len(ready))
        started = {name for name, answer in ready.items() if isinstance(answer, messages.Ready)}
        for name in started:
            self._transport.send(name, {"kind": "go"})
        reports = self._collect(started, messages.DevicesAnswer, limit_s, "while measuring its devices")
        for name, answer in {**ready, **reports}.items():
            if isinstance(answer, messages.DevicesAnswer):
                self._take_report(name, answer)

    def _backend(self) -> None:
        """Measure messages over the training backend between the processes that measured the devices. Skipped if there
        are fewer than two such processes, or if the link between any two of their nodes is broken.
        """
        # A process group forms only when all members reach each other, so a broken pair would cost a time-out.
        names = [name for name in self.outcome.alive if name in self.outcome.devices]
        apart = [pair for pair in self.outcome.broken if set(pair) <= set(names)]
        for a, b in apart:
            self.outcome.backend_failed[f"{a} - {b}"] = "they do not reach each other"
        if len(names) < 2 or apart:
            return
        self._tell("backend", 0, len(names))
        limit_s = self.settings.backend_deadline_s + BACKEND_GRACE_S
        first = names[0]
        addr = self.outcome.joined[first].addr
        self._transport.send(first, messages.RendezvousOrder(addr=addr).to_json())
        opened = self._collect({first}, messages.RendezvousAnswer, limit_s, "while opening the rendezvous")
        rendezvous = opened.get(first)
        if rendezvous is None or rendezvous.port is None:
            self.outcome.backend_failed[first] = (rendezvous and rendezvous.error) or "no rendezvous"
            return
        kinds = [{str(kind.kind) for kind in self.outcome.devices[name].device_types.values()} for name in names]
        order = {
            "kind": "exchange",
            "backend": choose_backend(kinds, self.settings.loopback),
            "world": len(names),
            "seed": self.settings.seed,
            "addr": addr,
            "port": rendezvous.port,
            "token": secrets.token_hex(16),
        }
        for rank, name in enumerate(names):
            self._transport.send(name, order | {"rank": rank})
        answers = self._collect(set(names), messages.ExchangeAnswer, limit_s, "in its messages")
        self._take_backend(names, answers)

    def _take_backend(self, names: Sequence[str], answers: dict[str, messages.ExchangeAnswer]) -> None:
        reports: dict[str, BackendReport] = {}
        for name, answer in answers.items():
            if answer.report is not None:
                reports[name] = answer.report
            else:
                self.outcome.backend_failed[name] = answer.error or "no figures"
        self.outcome.backend = backend_lines(names, reports)

    def _take_report(self, name: str, answer: messages.DevicesAnswer) -> None:
        if answer.report is not None:
            self.outcome.devices[name] = answer.report
        else:
            self.outcome.devices_failed[name] = answer.error or "no figures"

    def _collect(
        self, waiting: set[str], kind: type[Wanted] | tuple[type[Wanted], ...], limit_s: float, when: str,
        wanted: Callable[[Wanted], bool] = lambda answer: True,
    ) -> dict[str, Wanted]:  # fmt: skip
        """Wait for one answer of type `kind` from each node in `waiting`, and return node -> answer.

        A node that closes its connection, sends a malformed message or exceeds the time limit is lost.

        Args:
            when: the step of the probe, in words for the reason why a node is lost, as 'in round 3'.
            wanted: returns whether an answer belongs to this step; other answers come too late and are dropped.
        """
        answers: dict[str, Wanted] = {}
        waiting = waiting - set(self.outcome.lost)
        deadline = self._clock.now() + limit_s
        while waiting and (remaining_s := deadline - self._clock.now()) > 0:
            for name, answer in self._transport.receive(remaining_s):
                if isinstance(answer, ConnectionLost):
                    self._lose(name, f"{answer.why} {when}")
                    waiting.discard(name)
                # An answer of another kind or round came too late and is dropped.
                elif name in waiting and isinstance(answer, kind) and wanted(answer):
                    answers[name] = answer
                    waiting.discard(name)
        for name in sorted(waiting):
            self._lose(name, f"no answer {when} within {limit_s:g} s")
        return answers

    def _lose(self, name: str, reason: str) -> None:
        self.outcome.lost.setdefault(name, reason)
