"""Which state in memory a generation starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.memory.choose import choose_restore, pieces_of
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.memory_state import HeldState
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import Codec, NoCompression
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.plan import Plan, Replica, Stage, ZeroLevel


def plan_of(
    pp: int = 1, dp: int = 1, tp: int = 1, zero: ZeroLevel = 0, nodes: Sequence[str] = (), codec: Codec | None = None
) -> Plan:
    """A plan whose rank r is on the node n<r>, or on `nodes[r]`."""
    devices = [DeviceId(f"{node}:cpu0") for node in nodes or [f"n{rank}" for rank in range(pp * dp * tp)]]
    rows = [[devices[(stage * dp + replica) * tp : (stage * dp + replica) * tp + tp] for stage in range(pp)]
            for replica in range(dp)]  # fmt: skip
    return Plan(
        pp=pp, dp=dp, tp=tp, zero=zero, stages=[Stage(layers=(stage, stage + 1)) for stage in range(pp)],
        replicas=[Replica(sequences=2, micro_batch=1, micro_batches=2, devices=row) for row in rows],
        ranks=devices, compression=[CodecSpec(codec=codec or NoCompression())],
    )  # fmt: skip


def held(plan: Plan, rank: int, step: int = 7, **changes: Any) -> HeldState:
    state = {"generation": 2, "plan_sha256": plan.sha256(), "rank": rank, "step": step, "size_bytes": 100}
    return HeldState.model_validate({**state, "norm_step": step, **changes})


def on_nodes(states: Sequence[HeldState]) -> dict[str, list[HeldState]]:
    return {f"n{state.rank}": [state] for state in states}


DP2, ONE = plan_of(dp=2), plan_of()


def test_the_same_plan_continues_in_place() -> None:
    choice = choose_restore(on_nodes([held(DP2, 0), held(DP2, 1)]), {2: DP2}, DP2)
    assert choice is not None
    assert (choice.generation, choice.step, choice.continued) == (2, 7, (0, 1))


def test_one_of_two_replicas_is_enough() -> None:
    choice = choose_restore(on_nodes([held(DP2, 0)]), {2: DP2}, ONE)
    assert choice is not None
    assert (choice.step, choice.continued, [h.node for h in choice.holders]) == (7, (0,), ["n0"])


def test_the_replicas_that_are_left_continue_on_their_own_segments() -> None:
    """Also if the first node is lost, so that all ranks have other numbers."""
    old, new = plan_of(pp=2, dp=3), plan_of(pp=2, dp=2, nodes=("n1", "n2", "n4", "n5"))
    states = on_nodes([held(old, rank) for rank in range(1, 6)])
    assert _continued(states, old, new) == (1, 2, 4, 5)
    # The next generation finds the segments under the numbers that they were filled with.
    left = {node: states[node] for node in ("n1", "n4")}
    assert _continued(left, old, plan_of(pp=2, nodes=("n1", "n4"))) == (1, 4)
    # Here node n2 would get another stage.
    assert _continued(states, old, plan_of(pp=2, dp=2, nodes=("n1", "n4", "n2", "n5"))) == ()


@pytest.mark.parametrize(
    "new",
    [plan_of(dp=2, zero=1), plan_of(tp=2), plan_of(pp=2), plan_of(dp=2, codec=Quantized(mode="int4"))],
    ids=["shards", "tp", "stages", "codec"],
)
def test_a_plan_with_another_layout_of_the_state_continues_on_no_segment(new: Plan) -> None:
    assert _continued(on_nodes([held(DP2, 0), held(DP2, 1)]), DP2, new) == ()


def _continued(inventories: dict[str, list[HeldState]], old: Plan, new: Plan) -> tuple[int, ...]:
    choice = choose_restore(inventories, {2: old}, new)
    assert choice is not None
    return choice.continued


def test_half_of_a_sharded_state_is_none() -> None:
    sharded = plan_of(dp=2, zero=1)
    assert choose_restore(on_nodes([held(sharded, 0)]), {2: sharded}, ONE) is None


def test_a_step_that_every_rank_can_finish_is_finished() -> None:
    sharded = plan_of(dp=2, zero=1)
    states = [held(sharded, 0, 7, finishable=True, norm_step=8), held(sharded, 1, 7, finishable=True)]
    choice = choose_restore(on_nodes(states), {2: sharded}, sharded)
    assert choice is not None
    assert (choice.step, choice.continued) == (8, (0, 1))


def test_without_the_norm_on_any_rank_the_step_before_is_taken() -> None:
    sharded = plan_of(dp=2, zero=1)
    states = [held(sharded, 0, 7, finishable=True), held(sharded, 1, 7, finishable=True)]
    choice = choose_restore(on_nodes(states), {2: sharded}, sharded)
    assert choice is not None
    assert choice.step == 7


def test_a_replica_behind_the_other_gets_its_state_from_it() -> None:
    choice = choose_restore(on_nodes([held(DP2, 0, 8), held(DP2, 1, 7)]), {2: DP2}, DP2)
    assert choice is not None
    assert (choice.step, choice.continued, [h.rank for h in choice.holders]) == (8, (), [0])


def test_a_state_whose_update_began_is_not_the_old_one() -> None:
    sharded = plan_of(dp=2, zero=1)
    states = [held(sharded, 0, 7, finishable=True, norm_step=8), held(sharded, 1, 7)]
    assert choose_restore(on_nodes(states), {2: sharded}, sharded) is None


def test_a_node_without_ranks_in_the_new_plan_is_not_read() -> None:
    assert choose_restore({"n1": [held(DP2, 1)]}, {2: DP2}, ONE) is None


def test_an_older_state_than_the_checkpoint_is_not_taken() -> None:
    inventories = on_nodes([held(DP2, 0), held(DP2, 1)])
    assert choose_restore(inventories, {2: DP2}, DP2, newer_than=7) is None
    assert choose_restore(inventories, {2: DP2}, DP2, newer_than=6) is not None


def test_of_two_generations_with_one_step_the_one_in_place_is_taken_else_the_newer() -> None:
    # A fault during a restart: the old memory is there still, the new one holds the same step.
    both = {"n0": [held(DP2, 0, generation=1), held(DP2, 0)], "n1": [held(DP2, 1)]}
    assert _choice(both, DP2) == (2, True)
    both = {"n0": [held(DP2, 0, generation=1), held(DP2, 0)], "n1": [held(DP2, 1, generation=1)]}
    assert _choice(both, DP2) == (1, True)
    assert _choice({"n0": [held(DP2, 0, generation=1), held(DP2, 0)]}, DP2) == (2, False)


def _choice(inventories: dict[str, list[HeldState]], plan: Plan) -> tuple[int, bool]:
    choice = choose_restore(inventories, {1: plan, 2: plan}, plan)
    assert choice is not None
    return choice.generation, bool(choice.continued)


def test_a_state_of_another_plan_does_not_count() -> None:
    state = held(DP2, 0, plan_sha256="0" * 64)
    assert choose_restore(on_nodes([state]), {2: DP2}, ONE) is None


PLANS = [plan_of(*dims) for dims in [(1, 2), (2, 2), (1, 4, 1, 1), (2, 1, 2), (2, 2, 1, 1), (1, 2, 2)]]


@st.composite
def crashes(draw: st.DrawFn) -> tuple[Plan, dict[str, list[HeldState]], int]:
    """A plan of which the ranks were killed at any points that the protocol allows, nodes that are left, and the newest
    step of which any rank has the norm."""
    plan = draw(st.sampled_from(PLANS))
    begun = draw(st.booleans())
    states = []
    for rank in range(plan.world_size):
        if begun:  # some rank has the norm of step 8: every rank has complete gradients
            form = draw(st.sampled_from(["done", "under way", "gradients"]))
        else:
            form = draw(st.sampled_from(["gradients", "none"]))
        states.append(
            held(plan, rank, 8 if form == "done" else 7, finishable=form in ("under way", "gradients"),
                 norm_step=7 if form in ("gradients", "none") else 8)
        )  # fmt: skip
    left = draw(st.sets(st.integers(0, plan.world_size - 1), min_size=1))
    return plan, {f"n{rank}": [states[rank]] for rank in left}, begun


@settings(max_examples=300, deadline=None)
@given(crashes())
def test_what_is_chosen_is_whole_and_the_newest(crash: tuple[Plan, dict[str, list[HeldState]], bool]) -> None:
    plan, inventories, begun = crash
    choice = choose_restore(inventories, {2: plan}, plan)
    piece = pieces_of(plan)
    pieces = set(piece.values())
    there = [state for states in inventories.values() for state in states]
    if {piece[state.rank] for state in there} < pieces:
        assert choice is None
        return
    known = any(state.norm_step == 8 for state in there)
    if begun and not known:
        # Only ranks that are gone knew the norm; the others have not begun.
        assert choice is not None
        assert choice.step == 7
        return
    assert choice is not None
    assert choice.step == (8 if begun else 7)
    assert {piece[holder.rank] for holder in choice.holders} == pieces
    assert bool(choice.continued) == (len(there) == plan.world_size)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLANS), st.data())
def test_no_state_is_chosen_that_some_rank_cannot_give(plan: Plan, data: st.DataObject) -> None:
    """Also of states that no crash leaves."""
    states = [
        held(plan, rank, data.draw(st.integers(5, 8)), finishable=data.draw(st.booleans()),
             norm_step=data.draw(st.integers(4, 9)))
        for rank in range(plan.world_size)
    ]  # fmt: skip
    choice = choose_restore(on_nodes(states), {2: plan}, plan)
    if choice is None:
        return
    for holder in choice.holders:
        state = states[holder.rank]
        assert state.step == choice.step or (state.step == choice.step - 1 and state.finishable)
        assert not (state.step == choice.step and state.norm_step > state.step)
