"""What a plan does to save memory: asked for by hand, chosen where nothing else fits, refused where it cannot be."""

from __future__ import annotations

import re

import pytest

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.bench.planner.search import SearchCase, scene_of_case
from hpctrain.planner import make_plan
from hpctrain.planner.cost.live_micro_batches import live_micro_batches
from hpctrain.planner.cost.memory import MemoryModel, RankRole
from hpctrain.planner.cost.workload import ModelPart, workload_of
from hpctrain.records.plan.options_text import memory_options_text
from hpctrain.schedule.generate import make_schedule, stages_by_rank
from hpctrain.schedule.runnable import WHY_NOT_COMPILED_HALVES, WHY_NOT_COMPILED_TP, WHY_NOT_RECOMPUTED_HALVES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]

LARGE = {"layers": 8, "dim": 512, "heads": 8}


def fixed(**fields):
    return {"mode": "fixed", **fields}


def peaks(made):
    return max(made.predicted.memory_bytes.values())


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_zero_bubble_plans_are_whole(plan, topology, schedule, pp):
    made = plan(topology([1.0] * 3), parallel=fixed(pp=pp, schedule=schedule))
    assert made.schedule == schedule
    if schedule == "zbv":
        assert list(made.stage_owner().values()) == [*range(pp), *reversed(range(pp))]
    terms = made.predicted.step_time_s
    assert sum(value for term, value in terms.items() if term != "total") == pytest.approx(terms["total"])
    assert made.predicted.bound_s <= terms["total"]


def test_zero_bubble_is_chosen_where_it_wins(plan, topology):
    """Large blocks, few micro-batches and a fast network: the bubble is what costs."""
    asked = {"dims": LARGE, "rows": 4, "seq_len": 256}
    fast = topology((1, 1, 1, 1), default=(1e-6, 1e-11))
    shape = {"pp": 4, "micro_batch": 1}
    plain = plan(fast, parallel=fixed(schedule="1f1b", **shape), **asked)
    chosen = plan(fast, parallel=fixed(**shape), **asked)
    assert chosen.schedule in ("interleaved_zero_bubble", "zbv")
    assert chosen.predicted.step_time_s["pipeline_bubble"] < plain.predicted.step_time_s["pipeline_bubble"]
    lost = [entry for entry in chosen.rejected if entry.change == "schedule 1f1b"]
    assert lost
    assert lost[0].delta_s > 0


def test_compiled_blocks_keep_backwards_whole(plan, topology):
    made = plan(topology((1,) * 4, default=(1e-6, 1e-11)), parallel=fixed(pp=4), compile=True, dims=LARGE, rows=4)
    assert made.schedule not in ("interleaved_zero_bubble", "zbv")
    assert not any("zero_bubble" in entry.change or "zbv" in entry.change for entry in made.rejected)


def test_zero_needs_less_memory_and_each_level_more_time(plan, topology):
    four = topology((1, 1, 1, 1))
    made = [plan(four, parallel=fixed(dp=4, zero=zero, micro_batch=2), dims=LARGE) for zero in (0, 1, 2, 3)]
    assert [each.zero for each in made] == [0, 1, 2, 3]
    memory = [peaks(each) for each in made]
    assert all(less < memory[0] for less in memory[1:])
    times = [each.predicted.step_time_s["data_parallel"] for each in made]
    assert times[1] < times[2] < times[3]


@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_weights_are_gathered_in_the_precision_of_matrix_products(plan, topology, zero):
    four = topology((1, 1, 1, 1))
    made = {
        precision: plan(four, parallel=fixed(dp=4, zero=zero, micro_batch=2), dims=LARGE, precision=precision)
        for precision in ("fp32", "bf16", "fp16")
    }
    assert peaks(made["fp16"]) == peaks(made["bf16"]) < peaks(made["fp32"])
    times = {precision: each.predicted.step_time_s["data_parallel"] for precision, each in made.items()}
    assert times["fp16"] == times["bf16"] < times["fp32"]


@pytest.mark.parametrize(("recompute", "copies"), [("none", 4), ("full", 1)])
def test_autocast_keeps_a_copy_of_a_block_for_each_micro_batch_unless_it_is_computed_again(run, recompute, copies):
    needs = []
    for width in (1024, 2048):
        asked = run(dims=LARGE | {"ffn_dim": width}, precision="bf16", parallel=fixed(pp=2, recompute=recompute))
        work, _ = workload_of(asked, asked.spec())
        needs += [MemoryModel(work).need(RankRole("cpu", "gpipe", 2, 0, 2, 1, 1, 1, 1, 4), (1,)) - work_bytes(work)]
    assert needs[1] - needs[0] == (28 + 2 * copies) * 3 * 512 * 1024


def work_bytes(work):
    """Activations of four micro-batches in flight and one block at work, by what the workload says of them."""
    block, saved = work.block_bytes(1, 1), work.saved_activation_bytes(1, 1)
    return 4 * saved + (block if work.memory_options.recompute == "none" else 2 * block)


def test_zero_levels_two_and_three_share_the_batch_equally(plan, topology):
    uneven = topology((1.0, 0.25))
    counts = {zero: {replica.micro_batches for replica in plan(uneven, parallel=fixed(dp=2, zero=zero)).replicas}
              for zero in (1, 2)}  # fmt: skip
    assert (len(counts[1]), len(counts[2])) == (2, 1)
    with pytest.raises(InputError, match=r"3 micro-batches of 1 do not go evenly into 2 replicas, as zero 2 needs"):
        plan(uneven, rows=3, parallel=fixed(dp=2, zero=2))
    with pytest.raises(InputError, match=r"do not go evenly into 72 replicas, as zero 2 needs"):
        plan(topology((1.0,) * 9, devices=8), rows=100, parallel=fixed(dp=72, zero=2))


def test_a_single_replica_shards_nothing_and_says_so(plan, topology):
    made = plan(topology(), parallel=fixed(zero=2))
    assert made.zero == 0
    assert "parallel.zero 2 does not apply: with dp 1 there are no replicas to shard over." in made.notes


def test_sharding_within_nodes_puts_the_replicas_of_a_state_there(plan, topology):
    for degrees, nodes in (({"dp": 4}, 2), ({"pp": 2, "dp": 4}, 4), ({"dp": 4}, 1)):
        made = plan(topology((1,) * nodes, devices=8 // nodes), parallel=fixed(zero=1, shard="node", **degrees))
        for stage in range(made.pp):
            places = [replica.devices[stage][0].node for replica in made.replicas]
            for start in range(0, made.dp, made.shards):
                assert len(set(places[start : start + made.shards])) == 1
        assert made.shards > 1
    two_and_two = plan(topology((1, 1), devices=2), parallel=fixed(dp=4, zero=1, shard="node"))
    assert (two_and_two.shard, two_and_two.shards) == (2, 2)
    together = plan(topology((1,), devices=4), parallel=fixed(dp=4, zero=1, shard="node"))
    assert (together.shard, together.shards) == (None, 4)


def test_recomputation_trades_time_for_memory(plan, topology):
    made = {
        kind: plan(topology(), parallel=fixed(dp=2, recompute=kind, micro_batch=4), dims=LARGE, seq_len=256)
        for kind in ("none", "selective", "full")
    }
    assert {stage.recompute for stage in made["full"].stages} == {"full"}
    assert peaks(made["full"]) < peaks(made["selective"]) < peaks(made["none"])
    times = {kind: each.predicted.step_time_s["compute"] for kind, each in made.items()}
    assert times["none"] < times["selective"] < times["full"] < 1.5 * times["none"]


def test_sequence_parallelism_keeps_less(plan, topology):
    asked = {"dims": LARGE, "seq_len": 256}
    plain = plan(topology(devices=2), parallel=fixed(tp=2, micro_batch=4), **asked)
    split = plan(topology(devices=2), parallel=fixed(tp=2, micro_batch=4, sequence_parallel=True), **asked)
    assert split.sequence_parallel
    assert peaks(split) < peaks(plain)


def test_what_nothing_else_fits_is_saved_in_auto_mode(plan, topology):
    asked = {"dims": LARGE | {"layers": 6}, "seq_len": 512, "rows": 4}
    roomy = plan(topology((1, 1), memory=8e9), **asked)
    assert memory_options_text(roomy) == []
    for memory in (1.03e9, 0.93e9, 0.83e9, 0.73e9, 0.68e9):
        made = plan(topology((1, 1), memory=memory), **asked)
        assert peaks(made) <= 0.9 * memory
        if memory_options_text(made):
            break
    assert memory_options_text(made)
    assert any(note.startswith("Chosen to save memory: ") for note in made.notes)
    assert made.rejected[0].change == "zero 0 and recompute none"
    assert "would need" in made.rejected[0].reason
    with pytest.raises(RefusedError, match=r"cannot fit: with .* and zero 3, recompute full, the nearest to fitting"):
        plan(topology((1, 1), memory=3.33e8), **asked)


@pytest.mark.parametrize(("memory", "link"), [(8e9, (1e-5, 1e-10)), (1.2e9, (5e-4, 1e-8))])
def test_no_fixed_memory_option_beats_the_choice_among_all(plan, topology, memory, link):
    asked = {"dims": LARGE, "seq_len": 256, "rows": 8}
    nodes = topology((1.0, 0.6), devices=2, memory=memory, default=link)
    best_s = plan(nodes, **asked).predicted.step_time_s["total"]
    for pp, dp, tp in ((1, 4, 1), (2, 2, 1), (1, 2, 2)):
        for options in (
            {}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": "selective"}, {"recompute": "full"},
            {"sequence_parallel": True}, {"zero": 1, "recompute": "full"},
        ):  # fmt: skip
            if ("zero" in options and dp == 1) or ("sequence_parallel" in options and tp == 1):
                continue
            try:
                made = plan(nodes, parallel=fixed(pp=pp, dp=dp, tp=tp, **options), **asked)
            except HpctrainError:
                continue  # it does not fit, or the batch cannot be divided so
            assert best_s <= made.predicted.step_time_s["total"] * (1 + 1e-6)


@pytest.mark.parametrize("case", [SearchCase("unlike", 16, "7B"), SearchCase("paper", 32, "125M")])
def test_a_note_says_why_memory_options_were_chosen(case):
    asked, nodes = scene_of_case(case)
    made = make_plan(asked, asked.spec(), nodes)
    assert made.zero
    without = made.rejected[0]
    assert without.change == "zero 0 and recompute none"
    why = "Chosen to save memory" if without.delta_s is None else "Chosen because the step is shorter"
    assert any(note.startswith(f"{why}: zero {made.zero}") for note in made.notes)
    assert ("would need" in without.reason) == (without.delta_s is None)


def test_tied_embeddings_are_counted_once_on_one_stage(run):
    asked = run(dims={"tied": True})
    work, _ = workload_of(asked, asked.spec())
    table, norm = 512 * 128, 128
    assert work.parameters(ModelPart(0, True, True), 1) == table + norm
    assert work.parameters(ModelPart(0, True, False), 1) == table
    assert work.parameters(ModelPart(0, False, True), 1) == table + norm


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
    ],
)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 21, 40])
def test_live_micro_batches_are_those_of_the_whole_table(name, chunks, pp, micro_batches):
    stages = pp * chunks
    found = live_micro_batches(name, pp, stages, micro_batches)
    table = make_schedule(name, pp, stages, micro_batches)
    for row, own, moments in zip(table.ranks, stages_by_rank(name, pp, stages), found, strict=True):
        live, seen = dict.fromkeys(own, 0), set()
        for action in row:
            live[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            seen.add(tuple(live.values()))
        for weights in ((1, 1), (1, 5), (5, 1)):
            most = max(sum(w * n for w, n in zip(weights, moment, strict=False)) for moment in seen)
            assert max(sum(w * n for w, n in zip(weights, moment, strict=False)) for moment in moments) >= most


def test_a_v_needs_less_memory_than_interleaving(run):
    asked = run(dims=LARGE)
    work, _ = workload_of(asked, asked.spec())
    model = MemoryModel(work)
    needs = {
        name: max(model.need(RankRole("cpu", name, 4, rank, 8, 1, 1, 1, 1, 16), (1, 1)) for rank in range(4))
        for name in ("interleaved_1f1b", "zbv")
    }
    assert needs["zbv"] < needs["interleaved_1f1b"]


@pytest.mark.parametrize(
    ("message", "fields", "made"),
    [
        ("parallel.sequence_parallel: found true with tp 1; it needs tp 2 or more",
         {"parallel": fixed(dp=2, sequence_parallel=True)}, {}),
        ("data.seq_len 65 is not a multiple of tp 2", {"seq_len": 65,
         "parallel": fixed(tp=2, sequence_parallel=True)}, {}),
        ("parallel.shard: found 'node' with zero 0, which shards nothing", {"parallel": fixed(dp=2, shard="node")}, {}),
        ("shard node needs as many replicas of every stage in each node, two or more",
         {"parallel": fixed(dp=2, zero=1, shard="node")}, {}),
        ("shard node needs as many replicas", {"parallel": fixed(dp=3, zero=1, shard="node"), "rows": 6},
         {"speeds": (1, 1), "devices": 2}),
        (f"parallel.recompute: found 'full' with schedule zbv; {re.escape(WHY_NOT_RECOMPUTED_HALVES)}; use",
         {"parallel": fixed(pp=2, schedule="zbv", recompute="full")}, {}),
        (f"compile: found true with parallel.schedule zbv; {re.escape(WHY_NOT_COMPILED_HALVES)}; use",
         {"parallel": fixed(pp=2, schedule="zbv"), "compile": True}, {}),
        (f"compile is true, and {WHY_NOT_COMPILED_TP}", {"compile": True, "parallel": fixed(tp=2)}, {"devices": 2}),
        ("the model's 6 blocks are too few for the 8 stages of schedule zbv with 2 stages a rank",
         {"parallel": fixed(pp=4, schedule="zbv")}, {"speeds": (1,) * 4}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(plan, topology, message, fields, made):
    with pytest.raises(InputError, match=message) as caught:
        plan(topology(**made), **fields)
    assert "\n" not in str(caught.value)
