"""The agents' own code under schedules of faults on a simulated clock: what always holds, and what once did not."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpctrain.agent import agreement
from hpctrain.agent.agreement_messages import Accepted, AcceptRequest, AgreementMessage, Decided, Promise
from hpctrain.agent.consensus import AcceptorState, Ballot, Vote
from hpctrain.agent.start_files import PLAN_PATIENCE_S
from hpctrain.base.errors import FieldError, FileError
from hpctrain.bench.recovery.agreement_schedules import run_seed
from hpctrain.bench.recovery.simulated_cluster import ATTEMPT, SimulatedCluster
from hpctrain.bench.recovery.simulated_parts import SimulatedSource
from hpctrain.bench.recovery.simulated_world import HEARTBEAT_TIMEOUT_S, LIMITS, InvariantViolation
from hpctrain.cli.main import cli
from hpctrain.records.history.generation import Generation, Member, StoreAddress, record_file
from hpctrain.records.history.witness import WitnessEntry
from hpctrain.records.plan.plan import Plan

SEEDS = 500
PARTS = 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_rule(part: int) -> None:
    """A violation names its seed and its faults."""
    outcomes = [run_seed(seed) for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)]
    assert {outcome.kind for outcome in outcomes} == {"majority", "half", "any"}
    assert sum(outcome.in_tree for outcome in outcomes) > len(outcomes) / 5
    assert sum(outcome.generations for outcome in outcomes) > 1.5 * len(outcomes)
    assert sum(outcome.settled_s is not None for outcome in outcomes) > len(outcomes) / 3


def first_violation(seeds: int) -> str:
    """The message of the first schedule that breaks a rule; empty if none does."""
    for seed in range(seeds):
        try:
            run_seed(seed)
        except InvariantViolation as violation:
            return str(violation)
    return ""


TWO_RECORDS = re.compile("has two records|is not the record that the agents agreed on")


def test_a_promise_that_is_not_remembered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceptorState, "allows", lambda state, ballot: True)
    assert TWO_RECORDS.search(first_violation(300))


@pytest.mark.slow
def test_votes_that_do_not_bind_the_next_proposer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.Proposer, "bound_value", lambda proposer: None)
    assert TWO_RECORDS.search(first_violation(300))


def cluster_of(count: int, spares: int = 0, fan_out: int | None = None) -> SimulatedCluster:
    """Agents that have agreed on the first generation and train."""
    cluster = SimulatedCluster(count, seed=1, spares=spares, fan_out=fan_out)
    for node in cluster.nodes:
        cluster.start(node)
    assert_trains(cluster, *cluster.nodes)
    cluster.run(cluster.now + 1)
    return cluster


def assert_trains(cluster: SimulatedCluster, *nodes: str, within_s: float = 40.0) -> None:
    """The nodes train in one generation, and go on doing so."""

    def they_do() -> bool:
        members = cluster.records[max(cluster.records)].members if cluster.records else []
        return {member.node for member in members} == set(nodes) and cluster.is_training(set(nodes))

    cluster.run(cluster.now + within_s, they_do)
    assert they_do(), cluster.exits
    newest = max(cluster.records)
    cluster.run(cluster.now + 2 * HEARTBEAT_TIMEOUT_S)
    assert max(cluster.records) == newest


def nth(count: int, *kinds: type[AgreementMessage]) -> Callable[[object], bool]:
    """True for the message of these kinds with this number, from 1."""
    seen: list[object] = []

    def is_it(content: object) -> bool:
        seen.extend([content] if isinstance(content, kinds) else [])
        return len(seen) >= count

    return is_it


@pytest.mark.parametrize("asked", [1, 2, 3])
@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.012, 0.05])
def test_a_proposer_that_dies_after_it_was_voted_for_leaves_a_record_that_ends_at_once(
    asked: int, after_s: float
) -> None:
    """The record names the dead proposer, and everybody knew of its end before they entered it: they must not wait for
    news of it."""
    cluster = cluster_of(4)
    proposer = cluster.process("n0")
    assert proposer is not None
    proposer.killed_at = nth(asked, AcceptRequest)
    cluster.at(after_s, lambda: cluster.kill("n3"))
    cluster.kill("n3")
    assert_trains(cluster, "n1", "n2")
    assert "n0" not in cluster.processes
    # Where somebody has voted for the dead proposer's record, it came about, and then another one.
    assert len(cluster.records) == (2 if asked == 1 else 3)


def test_workers_that_cannot_start_end_the_generation_until_they_can() -> None:
    """A fork server was killed: the generation must not hang."""
    cluster = cluster_of(3)
    process = cluster.process("n1")
    assert process is not None
    process.group.dying_starts = 3
    process.group.die()
    assert_trains(cluster, *cluster.nodes)
    assert len(cluster.records) == 5


def test_a_hung_worker_is_ended_by_the_watchdog() -> None:
    cluster = cluster_of(3)
    process = cluster.process("n2")
    assert process is not None
    process.group.hangs_since = cluster.now
    assert_trains(cluster, *cluster.nodes)
    cluster.run(cluster.now + 20, lambda: len(cluster.records) == 2)
    assert_trains(cluster, *cluster.nodes)
    assert cluster.records[1].reason.startswith("n2: no step for 6 s")


def test_what_the_witness_has_voted_for_is_proposed_again_by_who_comes_next() -> None:
    """n0 has restarted, and proposes for half of the members. It dies when the witness has voted and nobody knows:
    n1, alone with the witness, is the half that must go on."""
    cluster = cluster_of(3)
    cluster.kill("n0")
    assert_trains(cluster, "n1", "n2")
    cluster.start("n0")
    cluster.run(cluster.now + 1)
    proposer = cluster.process("n0")
    assert proposer is not None
    proposer.files.dies_after = lambda result: witness_voted(cluster)
    cluster.kill("n2")
    cluster.run(cluster.now + 30, lambda: "n0" not in cluster.processes)
    assert witness_voted(cluster)
    assert record_file(next(iter(cluster.disk.files)).parent, 2) not in cluster.disk.files
    assert_trains(cluster, "n1")
    assert [member.node for member in cluster.records[2].members] == ["n0", "n1"]


def witness_voted(cluster: SimulatedCluster) -> bool:
    return any(isinstance(entry, WitnessEntry) and entry.record for entry in cluster.disk.files.values())


@pytest.mark.parametrize("hang_s", [0.0, 3.0])
def test_of_two_halves_one_goes_on(hang_s: float) -> None:
    """Where the files of one half hang, it comes later, and learns from the witness that the other half goes on."""
    cluster = cluster_of(4)
    if hang_s:
        cluster.disk.hangs_until = dict.fromkeys(("n0", "n1"), cluster.now + HEARTBEAT_TIMEOUT_S + hang_s)
    cluster.links.cut = {frozenset((a, b)) for a in ("n0", "n1") for b in ("n2", "n3")}
    cluster.run(cluster.now + 30)
    halves = [half for half in (("n0", "n1"), ("n2", "n3")) if cluster.is_training(set(half))]
    assert len(halves) == 1
    assert halves[0] == ("n2", "n3") or not hang_s
    assert cluster.exits == dict.fromkeys(set(cluster.nodes) - set(halves[0]), 75)
    assert len(cluster.records) == 2


@pytest.mark.parametrize("fan_out", [None, 2])
def test_heartbeats_and_votes_go_on_while_every_file_hangs(fan_out: int | None) -> None:
    """Two generations end meanwhile. Only workers wait: for their plan and logs."""
    cluster = cluster_of(5, fan_out=fan_out)
    begin, rest = cluster.now, [node for node in cluster.nodes if node != "n3"]
    cluster.disk.hangs_until = dict.fromkeys(cluster.nodes, begin + 10)
    cluster.kill("n3")
    for number in (1, 2):
        hurt = cluster.process("n2")
        assert hurt is not None
        cluster.run(cluster.now + 2)
        assert [cluster.processes[node].generation for node in rest] == [number] * 4
        hurt.agent._end_generation("a worker was lost")
    cluster.run(cluster.now + 2)
    while cluster.now < begin + 9:
        cluster.run(cluster.now + 0.5)
        for node in rest:
            process = cluster.process(node)
            assert process is not None
            late = {view.node: cluster.now - view.last_seen for view in process.mesh.views() if view.node != "n3"}
            assert max(late.values()) < HEARTBEAT_TIMEOUT_S, (node, late)
            assert (process.generation, process.training) == (3, None)
    assert record_file(next(iter(cluster.disk.files)).parent, 1) not in cluster.disk.files
    assert_trains(cluster, *rest)
    assert max(cluster.records) == 3


def test_a_loop_that_uses_a_file_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(2)
    process = cluster.process("n1")
    assert process is not None
    monkeypatch.setattr(process.agent, "_announcement", lambda: process.agent._next._store.newest())
    with pytest.raises(InvariantViolation, match="the agent's loop uses the file gen-"):
        cluster.run(cluster.now + 2)


def test_records_are_published_in_order_when_the_file_system_is_back() -> None:
    cluster = cluster_of(3)
    folder = next(iter(cluster.disk.files)).parent
    cluster.disk.fails = "gen-*"
    for _ in range(3):
        process = cluster.process("n1")
        assert process is not None
        process.group.die()
        assert_trains(cluster, *cluster.nodes)
    assert not [number for number in (1, 2, 3) if record_file(folder, number) in cluster.disk.files]
    cluster.disk.fails = ""
    cluster.run(cluster.now + 3)
    assert [cluster.disk.files[record_file(folder, number)] for number in range(4)] == list(cluster.records.values())


@pytest.mark.parametrize("what", ["*", "gen-*", "plan-*", "witness-*"])
@pytest.mark.parametrize("lost", [(), ("n2", "n3")])
def test_files_that_fail_for_seconds_end_no_agent(what: str, lost: tuple[str, ...]) -> None:
    cluster = cluster_of(4)
    cluster.disk.fails = what
    for node in lost:
        cluster.kill(node)
    process = cluster.process("n0")
    assert process is not None
    process.group.die()
    cluster.run(cluster.now + 3)
    cluster.disk.fails = ""
    assert_trains(cluster, *[node for node in cluster.nodes if node not in lost])
    assert cluster.exits == {}


def test_an_agent_that_leaves_publishes_what_was_decided_first() -> None:
    """Without the file, the next attempt would use the number of this generation again."""
    cluster = cluster_of(3)
    folder = next(iter(cluster.disk.files)).parent
    cluster.disk.fails = "gen-*"
    process = cluster.process("n0")
    assert process is not None
    process.group.die()
    assert_trains(cluster, *cluster.nodes)
    cluster.kill("n1")
    cluster.kill("n2")
    cluster.run(cluster.now + 30, lambda: process.agent._exit_code is not None)
    assert cluster.exits == {}
    cluster.disk.fails = ""
    cluster.run(cluster.now + 5)
    assert (cluster.exits, record_file(folder, 1) in cluster.disk.files) == ({"n0": 75}, True)


@pytest.mark.parametrize("attempt", [ATTEMPT - 1, ATTEMPT + 1])
def test_a_record_of_another_attempt_under_the_first_number_is_passed_over_or_ends_the_older_attempt(
    attempt: int,
) -> None:
    """An attempt that Slurm has given up may go on for a while on nodes that are cut off from it."""
    path = record_file(next(iter(cluster_of(2).disk.files)).parent, 0)
    cluster = SimulatedCluster(2, seed=1)
    for node in cluster.nodes:
        cluster.start(node)
    member = Member(node="n0", incarnation="n0-old", addr="127.0.0.1", store_port=1)
    foreign = Generation(
        number=0, attempt=attempt, members=[member], plan="generations/plan.json", reason="it went on",
        store=StoreAddress(addr="127.0.0.1", port=1, node="n0"),
    )  # fmt: skip
    cluster.disk.files[path] = foreign
    if attempt < ATTEMPT:
        assert_trains(cluster, *cluster.nodes)
        assert list(cluster.records) == [1]
    else:
        cluster.run(cluster.now + 20)
        assert (cluster.exits, cluster.records) == ({"n0": 1, "n1": 1}, {})
    assert cluster.disk.files[path] == foreign


def test_a_member_that_ends_its_workers_slowly_is_a_member_of_the_next_generation() -> None:
    recovery = LIMITS.recovery.model_copy(update={"heartbeat_timeout_s": 10.0})
    cluster = SimulatedCluster(4, seed=1, limits=replace(LIMITS, recovery=recovery))
    for node in cluster.nodes:
        cluster.start(node)
    assert_trains(cluster, *cluster.nodes)
    first, slow = cluster.process("n0"), cluster.process("n3")
    assert first is not None
    assert slow is not None
    slow.pause(LIMITS.collect_s + 4.0)
    first.group.die()
    assert_trains(cluster, *cluster.nodes)
    assert len(cluster.records[1].members) == 4


def test_checkpoints_that_cannot_be_read_for_seconds_end_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*arguments: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    cluster = cluster_of(2)
    process = cluster.process("n0")
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedSource, "make", stale)
        process.group.die()
        cluster.run(cluster.now + 2)
    assert_trains(cluster, *cluster.nodes)


def test_files_that_fail_for_good_end_the_attempt_with_the_error() -> None:
    """The job must not wait until its time limit."""
    cluster = cluster_of(4)
    cluster.disk.fails = "witness-*"
    cluster.kill("n2")
    cluster.kill("n3")
    cluster.run(cluster.now + 60)
    assert cluster.exits == {"n0": 1, "n1": 1}


def test_a_plan_that_cannot_be_read_ends_only_the_agent_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(3)
    process = cluster.process("n2")
    assert process is not None

    def unreadable(record: Generation) -> Plan:
        raise FileError(record.plan, [FieldError("", "cannot read: Stale file handle")])

    monkeypatch.setattr(process.agent._source, "plan_of", unreadable)
    process.group.die()
    with pytest.raises(InvariantViolation, match=r"the agent of n2 crashed: .*Stale file handle"):
        cluster.run(cluster.now + PLAN_PATIENCE_S + 5)
    cluster.kill("n2")
    assert_trains(cluster, "n0", "n1")


def test_a_node_alone_with_its_workers_ends_them_when_the_spares_go_on() -> None:
    """It holds all ranks, so its workers notice nothing of the cut."""
    cluster = cluster_of(3, spares=2)
    assert cluster.plans[cluster.records[0].plan].nodes == ["n0"]
    cluster.links.cut = {frozenset(("n0", "n1")), frozenset(("n0", "n2"))}
    cluster.run(cluster.now + HEARTBEAT_TIMEOUT_S + 2)
    alone = cluster.process("n0")
    assert alone is not None
    assert alone.training is None
    assert_trains(cluster, "n1", "n2")


def test_a_minority_that_leaves_takes_nobody_along() -> None:
    """n3 was cut off, and gives up while the others are still making their record; they hear of its end."""
    cluster = cluster_of(4)
    cluster.make_s = (4.0, 4.0)
    cluster.links.cut = {frozenset(("n3", node)) for node in ("n0", "n1", "n2")}
    cluster.run(cluster.now + HEARTBEAT_TIMEOUT_S + 2.5)
    cluster.links.cut = set()
    assert_trains(cluster, "n0", "n1", "n2")
    assert cluster.exits == {"n3": 75}


def test_lost_messages_are_sent_again() -> None:
    cluster = cluster_of(5)
    lost = [Promise, AcceptRequest, Accepted, Decided]
    deliver = cluster.deliver

    def losing(sender: str, receiver: str, content: object, late_s: float) -> None:
        if lost and isinstance(content, lost[0]):
            lost.pop(0)
        else:
            deliver(sender, receiver, content, late_s)

    cluster.deliver = losing  # type: ignore[method-assign]
    cluster.kill("n4")
    cluster.kill("n3")
    assert_trains(cluster, "n0", "n1", "n2")
    assert lost == []


def test_one_file_that_accepts_once_would_not_do_as_a_witness() -> None:
    """Half A votes for a, half B for b, and the file holds a. A majority that has one member of A sees b as the vote of
    the highest ballot: without the ballots that the journal keeps, it would decide b."""
    a, b = Vote(Ballot(1, "A"), "a"), Vote(Ballot(2, "B"), "b")
    seen = agreement.Proposer[str](Ballot(3, "C"), agreement.Electorate(frozenset({"1", "2", "3", "4"})))
    seen.note_promise("2", a)
    seen.note_promise("3", b)
    seen.note_promise("4", b)
    assert seen.bound_value() == "b"
    # So the witness must have refused a: it had promised B's ballot before B's members voted.
    witness: AcceptorState[str] = AcceptorState[str]().after_prepare(b.ballot)
    assert not witness.allows(a.ballot)


@pytest.mark.slow
def test_the_bench_prints_its_rows_and_fails_for_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(cli, ["bench", "agreement", "--schedules", "40", "--agents", "10", "--json"])
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout)
    schedules, large = record["rows"][:3], record["rows"][3:]
    assert sum(row["schedules"] for row in schedules) == 40
    assert 5 < sum(row["trees"] for row in schedules) < 20
    assert (record["violations"], [row["broken"] for row in schedules]) == ([], [0, 0, 0])
    assert [(row["case"], row["agents"]) for row in large] == [
        ("node below", 10), ("head of a block", 9), ("lowest node", 8),
    ]  # fmt: skip
    assert all(row["decided_s"] < 1 for row in large)
    assert record["settings"]["count"] == 40


def test_a_schedule_is_the_same_each_time() -> None:
    assert [replace(run_seed(seed)) for seed in range(6)] == [run_seed(seed) for seed in range(6)]
