"""One value is decided, whatever becomes of the messages; and one is decided where a quorum hears each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.agent.consensus import NO_BALLOT, WITNESS, AcceptorState, Ballot, Electorate, Proposer, Vote


def electorate(count: int) -> Electorate:
    return Electorate(frozenset(f"a{index}" for index in range(count)))


@pytest.mark.parametrize("count", range(1, 9))
def test_two_quorums_have_an_acceptor_in_common(count: int) -> None:
    voters = electorate(count)
    everybody = [*sorted(voters.members), *([WITNESS] if voters.has_witness else [])]
    sets = [
        {name for place, name in enumerate(everybody) if chosen >> place & 1} for chosen in range(1 << len(everybody))
    ]
    quorums = [names for names in sets if voters.is_quorum(names)]
    assert all(a & b for a in quorums for b in quorums)
    # Half alone is none, and half with the witness is one.
    half = set(everybody[: count // 2])
    assert not voters.is_quorum(half)
    assert voters.is_quorum(half | {WITNESS}) == (count % 2 == 0)
    assert not voters.is_quorum({*half, "a stranger", "another", "a third"})


def test_a_promise_refuses_lower_ballots_and_a_vote_is_remembered() -> None:
    state: AcceptorState[str] = AcceptorState()
    low, high = Ballot(1, "p"), Ballot(1, "q")
    assert NO_BALLOT < low < high < Ballot(2, "a")
    promised = state.after_prepare(high)
    assert (promised.allows(low), promised.allows(high)) == (False, True)
    voted = promised.after_accept(Vote(high, "v"))
    assert voted.after_prepare(Ballot(3, "a")) == AcceptorState(Ballot(3, "a"), Vote(high, "v"))
    with pytest.raises(AssertionError):
        promised.after_accept(Vote(low, "w"))


def test_the_vote_of_the_highest_ballot_binds_the_proposer() -> None:
    proposer: Proposer[str] = Proposer(Ballot(5, "p"), electorate(5))
    proposer.note_promise("a0", None)
    proposer.note_promise("a1", Vote(Ballot(2, "q"), "newer"))
    assert not proposer.is_prepared
    proposer.note_promise("a2", Vote(Ballot(1, "r"), "older"))
    assert (proposer.is_prepared, proposer.bound_value()) == (True, "newer")
    with pytest.raises(AssertionError):
        proposer.propose("older")
    proposer.propose("newer")
    proposer.note_promise("a3", Vote(Ballot(4, "s"), "late"))
    assert proposer.bound_value() == "newer"
    for acceptor in ("a0", "a1", "a1", "nobody"):
        proposer.note_accepted(acceptor)
    assert not proposer.is_decided
    proposer.note_accepted("a4")
    assert proposer.is_decided


@dataclass
class World:
    """Acceptors, proposers, and the messages under way, which are delivered in any order, twice or never."""

    voters: Electorate
    states: dict[str, AcceptorState[str]]
    proposers: list[Proposer[str]] = field(default_factory=list)
    under_way: list[tuple[str, Proposer[str], str, object]] = field(default_factory=list)
    votes: dict[tuple[Ballot, str], set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int) -> World:
        voters = electorate(count)
        names = [*sorted(voters.members), *([WITNESS] if voters.has_witness else [])]
        return cls(voters, {name: AcceptorState() for name in names})

    def begin(self, round_number: int, proposer: str) -> None:
        if any(known.ballot == (round_number, proposer) for known in self.proposers):
            return
        self.proposers.append(Proposer(Ballot(round_number, proposer), self.voters))
        self._send("prepare", self.proposers[-1])

    def deliver(self, place: int, again: bool) -> None:
        if not self.under_way:
            return
        place %= len(self.under_way)
        kind, proposer, acceptor, content = self.under_way[place] if again else self.under_way.pop(place)
        state, ballot = self.states[acceptor], proposer.ballot
        if kind == "prepare" and state.allows(ballot):
            self.states[acceptor] = state.after_prepare(ballot)
            self.under_way.append(("promise", proposer, acceptor, state.vote))
        elif kind == "accept" and state.allows(ballot):
            assert isinstance(content, str)
            self.states[acceptor] = state.after_accept(Vote(ballot, content))
            self.votes.setdefault((ballot, content), set()).add(acceptor)
            self.under_way.append(("accepted", proposer, acceptor, None))
        elif kind == "promise":
            proposer.note_promise(acceptor, content)  # type: ignore[arg-type]
            if proposer.is_prepared and proposer.value is None:
                proposer.propose(proposer.bound_value() or f"of {ballot}")
                self._send("accept", proposer)
        elif kind == "accepted":
            proposer.note_accepted(acceptor)

    def _send(self, kind: str, proposer: Proposer[str]) -> None:
        self.under_way += [(kind, proposer, acceptor, proposer.value) for acceptor in self.states]

    def decided(self) -> set[str]:
        return {value for (_, value), voters in self.votes.items() if self.voters.is_quorum(voters)}


STEPS = st.one_of(
    st.tuples(st.just("begin"), st.integers(1, 4), st.sampled_from("pqr")),
    st.tuples(st.just("deliver"), st.integers(0, 200), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 200), st.just(False)),
)


def play(world: World, kind: str, number: int, detail: object) -> None:
    if kind == "begin":
        world.begin(number, str(detail))
    elif kind == "deliver":
        world.deliver(number, bool(detail))
    elif world.under_way:
        world.under_way.pop(number % len(world.under_way))


@pytest.mark.slow
@given(st.integers(1, 6), st.lists(STEPS, min_size=20, max_size=120))
@settings(max_examples=300, deadline=None)
def test_no_history_decides_two_values(count: int, steps: list[tuple[str, int, object]]) -> None:
    world = World.of(count)
    for step in steps:
        play(world, *step)
        assert len(world.decided()) <= 1
    assert {proposer.value for proposer in world.proposers if proposer.is_decided} <= world.decided()


def test_no_long_history_of_many_proposers_decides_two_values() -> None:
    """Longer than Hypothesis draws them: where deliveries prevail, most histories decide."""
    decisions = 0
    for seed in range(1500):
        chance = random.Random(seed)
        world = World.of(chance.randint(1, 6))
        for _ in range(chance.randint(50, 250)):
            kind = chance.choices(("begin", "deliver", "lose"), (1, 12, 2))[0]
            detail: object = chance.choice("pqr") if kind == "begin" else chance.random() < 0.15
            play(world, kind, chance.randint(1, 6) if kind == "begin" else chance.randrange(1000), detail)
            assert len(world.decided()) <= 1, f"seed {seed}"
        decisions += len(world.decided())
    assert decisions > 500


@pytest.mark.parametrize("count", range(1, 7))
def test_a_quorum_decides_what_may_have_been_decided_before(count: int) -> None:
    """A proposer dies with its value accepted somewhere: whoever comes next proposes this value."""
    world = World.of(count)
    world.begin(1, "p")
    while world.under_way:
        world.deliver(0, again=False)
    assert world.decided() == {"of Ballot(round=1, proposer='p')"}
    world.begin(2, "q")
    while world.under_way:
        world.deliver(-1, again=False)
    assert world.proposers[1].value == "of Ballot(round=1, proposer='p')"
    assert world.proposers[1].is_decided
