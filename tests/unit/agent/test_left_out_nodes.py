"""Nodes that do not hear each other: what the agents make of it, one by one and together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_agents import Cluster, heartbeat

from hpctrain.agent.decide import Decision, decide
from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.peers import ReachabilityTracker, unreachable_pairs
from hpctrain.agent.tree.reading import read_message
from hpctrain.agent.view import AgentView, DecisionLimits, PeerView, Phase, WorkerView
from hpctrain.base.net.vertex_cover import NodePair
from hpctrain.base.net.wire import MalformedMessage
from hpctrain.records.history.generation import Generation, Member, StoreAddress
from hpctrain.records.run.recovery import Recovery

NODES = ("n0", "n1", "n2", "n3")
SETTINGS = DecisionLimits(
    Recovery(retries=2, heartbeat_timeout_s=5), collect_s=2, proposer_takeover_s=5, join_timeout_s=60
)
NOW = 100.0


def record(members: tuple[str, ...] = NODES) -> Generation:
    return Generation(
        number=3,
        attempt=0,
        members=[Member(node=n, incarnation=f"{n}-a", addr="127.0.0.1", store_port=1) for n in members],
        plan="plan.json",
        store=StoreAddress(addr="127.0.0.1", port=1, node=members[0]),
        reason="start",
    )


def peer(node: str, phase: Phase = "fault", unheard: tuple[int, ...] = ()) -> PeerView:
    return PeerView(node, f"{node}-a", True, False, NOW, 3, phase, "", (), unheard)


def between(
    me: str, pairs: set[NodePair], since: float = NOW - 2, members: tuple[str, ...] = NODES, **changes: object
) -> AgentView:
    """The view of an agent in between two generations that hears all those it is not cut off from."""
    deaf = {node for pair in pairs if me in pair for node in pair}
    view = AgentView(
        me, NODES, "fault", NOW, reason="node n2 has been silent for 5 s", record=record(members),
        peers=tuple(peer(n) if n not in deaf else PeerView(n, lost=True) for n in NODES if n != me),
        silent=dict.fromkeys(pairs, since), incarnation=f"{me}-a",
    )  # fmt: skip
    return replace(view, **changes)  # type: ignore[arg-type]


def test_of_a_cut_pair_the_later_is_left_out() -> None:
    cut = {("n1", "n2")}
    decision = decide(NOW, between("n0", cut), SETTINGS)
    assert (decision.act, decision.members) == ("propose", ("n0", "n1", "n3"))
    assert decision.left_out == {"n2": "n2 is left out: it and n1 do not hear each other"}
    assert decide(NOW, between("n1", cut), SETTINGS) == Decision("wait", "node n0 proposes the next generation")
    assert decide(NOW, between("n2", cut), SETTINGS) == Decision("wait", decision.left_out["n2"])


def test_a_pair_that_fell_silent_just_now_may_hear_each_other_again() -> None:
    view = between("n0", {("n1", "n2")}, since=NOW - 1.9)
    assert decide(NOW, view, SETTINGS) == Decision("wait", "waiting for the other nodes")
    assert decide(NOW, replace(view, silent={}), SETTINGS).members == NODES


def test_who_is_out_stays_out_while_the_cut_lasts_and_comes_back_when_it_is_healed() -> None:
    members = ("n0", "n2", "n3")
    lasting = decide(NOW, between("n0", {("n1", "n2")}, members=members), SETTINGS)
    assert (lasting.members, list(lasting.left_out)) == (members, ["n1"])
    assert decide(NOW, between("n0", set(), members=members), SETTINGS).members == NODES


def test_the_first_node_is_left_out_where_it_is_the_one_that_nobody_hears() -> None:
    cut = {("n0", "n1"), ("n0", "n2")}
    decision = decide(NOW, between("n1", cut), SETTINGS)
    assert decision.members == ("n1", "n2", "n3")
    assert decision.left_out == {"n0": "n0 is left out: it and n1, n2 do not hear each other"}
    assert decide(NOW, between("n0", cut), SETTINGS).act == "wait"


def test_too_few_that_hear_each_other_end_the_attempt_and_name_the_cut() -> None:
    decision = decide(NOW, between("n0", {("n1", "n2")}), replace(SETTINGS, recovery=Recovery(min_nodes=4)))
    assert (decision.act, decision.exit_code) == ("fail", 75)
    assert "recovery.min_nodes is 4; n2 is left out: it and n1 do not hear each other" in decision.reason
    assert (decision.members, list(decision.left_out)) == (("n0", "n1", "n3"), ["n2"])


def first_of_all(unmet: set[NodePair], **settings: object) -> Decision:
    peers = tuple(replace(peer(n, "joining"), generation=-1) for n in NODES[1:])
    view = AgentView("n0", NODES, "joining", NOW - 10, peers=peers, silent=dict.fromkeys(unmet, NOW - 10))
    return decide(NOW, view, replace(SETTINGS, **settings))  # type: ignore[arg-type]


def test_the_first_generation_waits_until_all_have_met() -> None:
    assert first_of_all(set()).members == NODES
    assert first_of_all({("n1", "n2")}) == Decision("wait", "waiting for the other nodes")
    assert first_of_all({("n1", "n2")}, join_timeout_s=10).members == ("n0", "n1", "n3")


def test_a_node_that_nobody_hears_at_the_start_is_left_out_with_a_reason() -> None:
    peers = tuple(replace(peer(n, "joining"), generation=-1) for n in NODES[1:3])
    view = AgentView("n0", NODES, "joining", NOW - 59, peers=(*peers, PeerView("n3", lost=True)))
    assert decide(NOW, view, SETTINGS).act == "wait"
    decision = decide(
        NOW + 61, replace(view, peers=tuple(replace(p, last_seen=NOW + 61) for p in view.peers)), SETTINGS
    )
    assert (decision.act, decision.members) == ("propose", ("n0", "n1", "n2"))
    assert decision.left_out == {"n3": "n3 is left out: n0 did not hear it in 120 s"}


def test_a_link_that_the_probe_could_not_measure_needs_no_wait() -> None:
    decision = first_of_all({("n1", "n2")}, broken_links=(("n1", "n2"),))
    assert decision.members == ("n0", "n1", "n3")
    healed = first_of_all(set(), broken_links=(("n1", "n2"),))
    assert healed.left_out == {"n2": "n2 is left out: the probe could not measure its link to n1"}


def test_nobody_is_left_out_for_the_sake_of_a_node_that_no_plan_uses() -> None:
    """Plans do without the nodes that the probe advises against: their links do not matter."""
    links = (("n1", "n2"), ("n2", "n3"))
    assert list(first_of_all(set(), broken_links=links).left_out) == ["n2"]
    advised = first_of_all(set(), broken_links=links, advised_against=("n1", "n3"))
    assert (advised.members, advised.left_out) == (NODES, {})
    # That two do not hear each other matters for every agent; there the one that no plan uses goes.
    silent = first_of_all({("n1", "n2")}, join_timeout_s=10, advised_against=("n1",))
    assert list(silent.left_out) == ["n1"]


UNMEASURED = (("n0", "n1"), ("n0", "n2"), ("n0", "n3"), ("n1", "n2"), ("n1", "n3"), ("n2", "n3"))


def test_who_is_left_out_is_named_where_too_few_can_go_on_together() -> None:
    decision = first_of_all(set(), broken_links=UNMEASURED)
    assert (decision.act, decision.exit_code) == ("fail", 75)
    assert (decision.members, list(decision.left_out)) == (("n0",), ["n1", "n2", "n3"])
    assert not decision.cut_off, "the others come to the same end"
    assert decision.reason == "; ".join(
        ["only 1 of 4 nodes can go on together (n0)", *decision.left_out.values()]
    )  # fmt: skip


def test_a_node_beyond_a_cut_is_not_told_as_lost_where_others_are_left_out() -> None:
    """It may be going on: nobody here can say that it is gone."""
    view = between("n0", set(), peers=(peer("n1"), peer("n2"), PeerView("n3", lost=True)))
    links = (("n0", "n1"), ("n0", "n2"), ("n1", "n2"))
    decision = decide(NOW + 2, view, replace(SETTINGS, broken_links=links))
    assert (decision.members, list(decision.left_out)) == ((), ["n1", "n2"])
    assert decision.cut_off, "it takes none of those along that may be going on"
    assert decision.reason.endswith("its link to n0, n1; the others may be going on without it")


def looking_on(**changes: object) -> AgentView:
    """n2 was left out; n0, n1 and n3 train."""
    peers = (peer("n0", "running"), PeerView("n1", lost=True, last_seen=NOW - 50), peer("n3", "running"))
    view = AgentView(
        "n2", NODES, "running", NOW - 20, record=record(("n0", "n1", "n3")), peers=peers, working=("n0", "n1", "n3"),
        workers=WorkerView(), incarnation="n2-a",
    )  # fmt: skip
    return replace(view, **changes)  # type: ignore[arg-type]


def test_who_is_left_out_ends_nothing_because_it_hears_less() -> None:
    assert decide(NOW, looking_on(), SETTINGS).act == "wait"
    isolated = tuple(replace(seen, last_seen=NOW - 5.1) for seen in looking_on().peers)
    alone = decide(NOW, looking_on(peers=isolated), SETTINGS)
    assert alone == Decision("end_generation", "no node that trains was heard for 5 s")


def test_who_was_isolated_and_hears_the_others_train_proposes_nothing() -> None:
    view = looking_on(phase="fault", phase_since=NOW - 900, silent={("n1", "n2"): NOW - 900})
    assert decide(NOW, view, SETTINGS).act == "wait"
    assert decide(NOW, replace(view, silent={}), SETTINGS) == Decision("wait", "the others train without this node")


@pytest.mark.parametrize("phase", ["done", "stopped", "failed"])
def test_who_is_left_out_ends_with_the_others(phase: Phase) -> None:
    ended = (peer("n0", phase), *looking_on().peers[1:])
    assert decide(NOW, looking_on(peers=ended), SETTINGS).act in ("finish", "stop", "fail")


def test_who_only_looks_on_and_leaves_takes_nobody_along() -> None:
    """It hears of a request to stop at once; the members save first, for as long as that takes."""
    lonely = looking_on(phase="fault", stop_wanted=True)
    assert decide(NOW, lonely, SETTINGS).act == "stop"
    for phase in ("stopped", "failed"):
        gone = replace(peer("n2", phase), reason="gone")
        view = AgentView(
            "n0", NODES, "running", NOW - 20, record=record(("n0", "n1", "n3")),
            peers=(peer("n1", "running"), gone, peer("n3", "running")), working=("n0", "n1", "n3"),
            workers=WorkerView(1, None, NOW), stop_wanted=True, incarnation="n0-a",
        )  # fmt: skip
        assert decide(NOW, view, SETTINGS) == Decision("wait", "training")


@pytest.mark.parametrize(("phase", "act"), [("done", "finish"), ("stopped", "stop"), ("failed", "fail")])
def test_who_lost_sight_of_the_members_and_finds_them_at_their_end_begins_nothing(phase: Phase, act: str) -> None:
    ended = tuple(replace(peer(node, phase), reason="that is all") for node in ("n0", "n1", "n3"))
    decision = decide(NOW, looking_on(phase="fault", peers=ended), SETTINGS)
    assert decision.act == act
    # A node that was no member, or one that ended before, says nothing about this generation.
    for stale in (replace(peer("n0", phase), generation=2), replace(ended[0], node="n2")):
        view = between("n1", set(), members=("n0", "n1", "n3"), peers=(peer("n0"), stale, peer("n3")))
        if stale.node == "n0":
            view = replace(view, peers=(stale, peer("n3")))
        assert decide(NOW, view, SETTINGS).act in ("wait", "propose")


def test_a_crashed_agent_is_gone_at_once_and_by_its_own_words() -> None:
    said = replace(peer("n1", "crashed"), reason="the agent of n1 crashed: OSError: no")
    view = AgentView(
        "n0", NODES, "running", NOW, record=record(), peers=(said, peer("n2", "running"), peer("n3", "running")),
        working=NODES, workers=WorkerView(1, None, NOW), incarnation="n0-a",
    )  # fmt: skip
    assert decide(NOW, view, SETTINGS) == Decision("end_generation", said.reason)
    later = replace(view, phase="fault", peers=(said, peer("n2"), peer("n3")))
    assert decide(NOW, later, SETTINGS).members == ("n0", "n2", "n3")
    crashed = tuple(replace(said, node=node, incarnation=f"{node}-a", connected=False) for node in NODES[1:])
    last = decide(NOW + 3, replace(later, peers=crashed), SETTINGS)
    assert last.act == "fail"
    assert last.reason.startswith("the agent of n1 crashed: OSError: no; ")
    assert last.reason.endswith("only 1 of 4 nodes can be reached from n0")


everybody = [(a, b) for at, a in enumerate(NODES) for b in NODES[at + 1 :]]


@given(cut=st.sets(st.sampled_from(everybody)), dead=st.sets(st.sampled_from(NODES), max_size=3))
def test_all_agents_that_hear_of_a_cut_mean_the_same(cut: set[NodePair], dead: set[str]) -> None:
    """Each agent is told the truth by those it hears. No two propose, no proposal has both ends of a cut."""
    hears = {
        node: [n for n in NODES if n != node and n not in dead and not {(n, node), (node, n)} & cut] for node in NODES
    }
    proposals = []
    for me in (node for node in NODES if node not in dead):
        unheard = {n: [other for other in NODES if other != n and other not in hears[n]] for n in hears[me]}
        pairs = unreachable_pairs(me, NODES, unheard)
        assert pairs <= cut
        peers = tuple(peer(n) if n in hears[me] else PeerView(n, lost=True) for n in NODES if n != me)
        view = between(me, set(), peers=peers, silent=dict.fromkeys(pairs, NOW - 2))
        decision = decide(NOW, view, SETTINGS)
        if decision.act == "propose":
            proposals.append(decision.members)
    assert len(proposals) <= 2  # two halves may, and the exclusive file decides
    for members in proposals:
        assert not [pair for pair in cut if set(pair) <= set(members)]
        assert not dead & set(members)
    if len(cut) == 1 and not dead:
        assert len(proposals) == 1


@pytest.mark.parametrize("unheard", [[-1], [True], ["n1"], [1.0], 1, {"1": 1}, None])
def test_a_heartbeat_tells_places_of_nodes_or_is_refused(unheard: object) -> None:
    heard = read_message(json.loads(heartbeat("n1", unheard=[2, 9])))
    assert isinstance(heard, Announcement)
    assert heard.unheard == (2, 9)
    with pytest.raises(MalformedMessage, match="unheard"):
        read_message(json.loads(heartbeat("n1", unheard=unheard)))
    # One that is no place of a node counts for nothing.
    reachability = ReachabilityTracker("n0", NODES, SETTINGS)
    reachability.note(NOW, [peer("n1", unheard=(2, 99)), peer("n2"), peer("n3")])
    assert reachability.silent == {("n1", "n2"): NOW}
    reachability.note(NOW + 1, [replace(peer("n1", unheard=(2,)), last_seen=NOW + 1), peer("n2"), peer("n3")])
    assert reachability.silent == {("n1", "n2"): NOW}
    reachability.note(NOW + 2, [peer("n1"), peer("n2"), peer("n3")])
    assert reachability.silent == {}


def test_a_lost_node_makes_no_pair() -> None:
    assert unreachable_pairs("n0", NODES, {"n1": ["n3"], "n2": ["n3"]}) == set()
    assert unreachable_pairs("n0", NODES, {"n1": ["n3"], "n2": []}) == {("n0", "n3"), ("n1", "n3")}
    assert unreachable_pairs("n0", NODES, {}) == set()


def test_agents_learn_of_a_cut_between_others_and_of_its_end(cluster: Cluster) -> None:
    nodes = ("n0", "n1", "n2")
    trackers = {node: ReachabilityTracker(node, nodes, SETTINGS) for node in nodes}
    for node in nodes:
        cluster.start(node)

    def turn() -> None:
        for node, agent in cluster.agents.items():
            views = agent.peers.views()
            agent.says = agent.says.model_copy(update={"unheard": trackers[node].unheard(cluster.now, views)})
            trackers[node].note(cluster.now, views)

    def until(condition) -> None:  # type: ignore[no-untyped-def]
        def holds() -> bool:
            turn()
            return bool(condition())

        cluster.until(holds)

    until(lambda: all(not reachability.silent for reachability in trackers.values()))
    until(lambda: all(agent.says.unheard == () for agent in cluster.agents.values()))
    cluster.cut("n1", "n2")
    until(lambda: all(set(reachability.silent) == {("n1", "n2")} for reachability in trackers.values()))
    cluster.heal()
    until(lambda: all(not reachability.silent for reachability in trackers.values()))
