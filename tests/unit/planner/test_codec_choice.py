"""Mode auto: what links, devices, memory and gaps of the loss make of it, and that the plan says why."""

from __future__ import annotations

import math
import re

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import RefusedError
from hpctrain.cli.commands.plan import plan_command as command
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, make_tensor_parallel_groups
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.search.codec_choice import MIN_GAIN, MIN_LOSSY_GAIN, candidate_codecs
from hpctrain.planner.search.measured_gradients import group_shares
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.plan import gradient_codec
from hpctrain.records.plan.compression import Bf16, Mixed, make_codec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.layer_groups import LAYER_GROUPS
from hpctrain.records.plan.loss_gaps import LossGap
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import CodecSeconds

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]
LOW_RANK_INT2 = {"mode": "power_sgd", "rank": "auto", "remainder": "int2"}
LOW_RANKS = (LOW_RANK_INT2, {"mode": "power_sgd"})
GAPS = [
    ({"mode": "rotated_int4"}, -0.001),
    (LOW_RANK_INT2, 0.005),
    ({"mode": "rotated_int3"}, 0.01),
    ({"mode": "rotated_int2"}, 0.02),
]
"""Measured gaps of the loss, the smallest first."""

SLOW, FAST = (2e-4, 8e-8), (5e-5, 2e-10)
"""100 Mbit/s, and a loopback."""
LARGE = {"layers": 8, "dim": 512, "heads": 8}
AUTO = {"mode": "auto", "lossy": True}
DENSE = ["none", "bf16", *Quantized.modes()]
"""Codecs that keep the loss."""
TOPK = "topk, density 0.07"


def fixed(**fields):
    return {"mode": "fixed", **fields}


@pytest.fixture(autouse=True)
def measured_gaps(monkeypatch):
    """Gaps of the loss that do not change with what is measured."""
    rows = tuple(LossGap(settings, share, None, 1e6, 1, "") for settings, share in GAPS)
    monkeypatch.setattr(gradient_codec, "LOSS_GAPS", rows)


def compared(plan: Plan):
    return {each.codec.label: each for each in plan.compression[0].compared}


def test_slow_links_are_given_low_rank_and_fast_ones_exact_sums(plan, topology):
    asked = {"compression": AUTO, "parallel": fixed(dp=2), "dims": LARGE, "steps": 10_000}
    slow, fast = plan(topology(default=SLOW), **asked), plan(topology(default=FAST), **asked)
    assert (slow.codec.mode, fast.codec.mode) == ("power_sgd", "none")
    assert slow.codec.warmup_steps == 100
    exact = plan(topology(default=SLOW), **asked | {"compression": {"mode": "none"}})
    assert slow.predicted.step_time_s["total"] < 0.5 * exact.predicted.step_time_s["total"]
    assert slow.predicted.bound_s <= slow.predicted.step_time_s["total"]
    for made in (slow, fast):
        by_gap = [make_codec(settings).label for settings, _ in GAPS]
        assert list(compared(made)) == [*DENSE, *by_gap, "power_sgd", TOPK], "those without a gap last"
        assert [each.verdict for each in compared(made).values()].count("chosen") == 1
        assert compared(made)[made.codec.label].verdict == "chosen"
        assert compared(made)[made.codec.label].step_s <= compared(made)["none"].step_s
        assert Plan.model_validate_json(made.model_dump_json(by_alias=True)).compression == made.compression
    assert all(compared(slow)[mode].hidden_s > 0 for mode in DENSE)
    assert all(compared(slow)[mode].hidden_s == 0 for mode in ("power_sgd", TOPK))
    assert all(compared(fast)[mode].hidden_s == 0 for mode in DENSE), "CPUs send no faster than this link carries"
    assert "no other way saves enough" in fast.compression[0].reason


def test_placements_are_searched_as_if_sums_were_of_integers(plan, topology):
    slow = topology((1.0,) * 8, default=(2e-4, 8e-8))
    asked = {"rows": 8, "seq_len": 1024, "dims": {"layers": 8, "dim": 256, "heads": 8}, "steps": 1000}
    exact = plan(slow, compression={"mode": "none"}, **asked)
    made = plan(slow, compression={"mode": "auto"}, **asked)
    assert (made.dp, made.codec.mode) == (8, "int4")
    assert exact.dp < made.dp, "replicas pay once their sums are small"
    assert made.predicted.step_time_s["total"] < 0.8 * exact.predicted.step_time_s["total"]
    assert made.predicted.bound_s <= made.predicted.step_time_s["total"]


def test_what_costs_loss_is_chosen_only_where_that_is_allowed(plan, topology):
    asked = {"compression": {"mode": "auto"}, "parallel": fixed(dp=2), "dims": LARGE, "steps": 1000}
    made = plan(topology(default=SLOW), **asked)
    assert made.codec.mode == "int4"
    assert list(compared(made)) == DENSE


@pytest.mark.parametrize(
    ("budget", "steps", "expected"),
    [
        (0, 1000, "int4"),
        (0.01, 1000, "rotated_int3"),
        (0.007, 100_000, "power_sgd, rank auto, remainder int2"),
        (0.03, 1000, "rotated_int2"),
    ],
)
def test_a_loss_budget_allows_codecs_that_were_measured_within_it(plan, topology, budget, steps, expected):
    asked = {"compression": {"mode": "auto", "loss_budget": budget}, "parallel": fixed(dp=2), "dims": LARGE}
    made = plan(topology(default=(2e-4, 8e-7)), steps=steps, **asked)  # 10 Mbit/s
    within = [make_codec(settings).label for settings, gap in GAPS if budget > 0 and gap <= budget]
    assert [label for label, each in compared(made).items() if each.codec.mode != "mixed"] == DENSE + within
    assert made.codec.label == expected
    assert plan(topology(default=FAST), steps=steps, **asked).codec.mode == "none"


@pytest.mark.parametrize("gaps", [(0.0085, 0.0815), (0.0815, 0.0085)], ids=["as measured", "exchanged"])
def test_of_codecs_that_are_about_equally_fast_the_one_with_the_smaller_gap_is_chosen(
    plan, topology, monkeypatch, gaps
):
    """On these devices, integers take long and low rank is fast, with 2 bits for the rest and without."""
    low_rank = [LossGap(settings, gap, None, 1e6, 1, "") for settings, gap in zip(LOW_RANKS, gaps, strict=True)]
    monkeypatch.setattr(gradient_codec, "LOSS_GAPS", tuple(low_rank))
    slow_integers = CodecSeconds(bf16=1e-7, quantized=1e-7, topk=1e-7, power_sgd=1e-9, rotated=1e-9)
    asked = {"compression": {"mode": "auto", "loss_budget": 0.1}, "parallel": fixed(dp=2), "dims": LARGE}
    made = plan(topology(default=(2e-4, 1.1e-8), codec_s=slow_integers), steps=10_000, **asked)
    smaller, larger = (make_codec(one.settings).label for one in sorted(low_rank, key=lambda one: one.share))
    assert made.codec.label == smaller
    step_s = {label: figures.step_s for label, figures in compared(made).items()}
    fast_s, slow_s = sorted([step_s[smaller], step_s[larger]])
    assert 1 - fast_s / slow_s < MIN_LOSSY_GAIN < 1 - slow_s / step_s["none"], "alone, both would be chosen"


def test_layer_groups_get_codecs_of_their_own_where_the_budget_allows_few_bits_for_a_part(plan, topology, run):
    """With 0.015, 2 bits for all (gap 0.02) are too few, and 3 bits (gap 0.01) more than are needed."""
    parallel, slow, fast = fixed(dp=2), topology(default=(2e-4, 8e-7)), topology(default=FAST)

    def made(budget: float, links) -> Plan:
        compression = {"mode": "auto", "loss_budget": budget}
        return plan(links, steps=1000, compression=compression, parallel=parallel, dims=LARGE)

    chosen = made(0.015, slow)
    figures = compared(chosen)
    mixed = figures[chosen.codec.label]
    assert isinstance(chosen.codec, Mixed)
    work, _ = workload_of(run(parallel=parallel, dims=LARGE), run(dims=LARGE).spec())
    shares, gaps = group_shares(work, []).shares, {settings["mode"]: max(0.0, gap) for settings, gap in GAPS}
    modes = {group: chosen.codec.codec_of(group).mode for group in LAYER_GROUPS}
    assert mixed.predicted_gap == pytest.approx(sum(shares[group] * gaps.get(modes[group], 0.0) for group in modes))
    assert {codec.mode for codec in chosen.codec.groups} > {"rotated_int2"}
    assert 0.01 < mixed.predicted_gap <= 0.015
    assert mixed.step_s <= (1 - MIN_GAIN) * figures["rotated_int3"].step_s
    reasons = chosen.compression[-1].group_reasons
    assert {group: reason.partition(",")[0] for group, reason in reasons.items()} == modes
    assert Plan.from_json(chosen.to_json()) == chosen
    for one in (made(0.03, slow), made(0.015, fast), made(0, slow)):
        assert one.codec.mode != "mixed", "2 bits are allowed for all, or links are fast, or there is no budget"
    assert all(each.codec.mode != "mixed" for each in compared(made(0, slow)).values())


def test_measured_energy_decides_which_layer_group_gets_fewer_bits(topology, run):
    shares = {"embedding_head": 0.5, "attention": 0.4, "feed_forward": 0.1}
    work, _ = workload_of(run(parallel=fixed(dp=2), dims=LARGE), run(dims=LARGE).spec())
    figures = [
        LayerFigures(layer="0", numbers=100, gradient_variance=1.0, attention_share=0.8),
        LayerFigures(layer="embedding", numbers=50, gradient_variance=2.0, attention_share=0.0),
    ]
    assert group_shares(work, figures) == (pytest.approx(shares), True)
    by_size, measured = group_shares(work, figures[:1])
    attention, feed_forward = 4 * 512**2, 3 * 512 * work.spec.hidden
    assert by_size["attention"] / by_size["feed_forward"] == pytest.approx(attention / feed_forward)
    assert not measured


@pytest.mark.parametrize(("bits_per_s", "expected"), [(1e8, "int4"), (1e9, "int4"), (4e10, "none")])
def test_what_was_the_fastest_on_a_lab_is_chosen_there(plan, topology, bits_per_s, expected):
    """The model, links and processors of docs/results/compression.md: 4 nodes of one core. The seconds of codecs are
    the package's, which cores with about 20 GB/s have."""
    made = plan(
        topology((2.0,) * 4, default=(1e-4, 8 / bits_per_s), flops=1.75e10, launch_s=2e-6),
        compression={"mode": "auto"},
        parallel=fixed(dp=4, micro_batch=1),
        dims={"layers": 6, "dim": 384, "heads": 6, "vocab": 320},
        rows=4,
        seq_len=64,
        steps=10_000,
    )
    ways = compared(made)
    assert made.codec.mode == expected
    assert ways[expected].step_s == min(each.step_s for each in ways.values())


@pytest.mark.parametrize("beta", [10 ** (-power / 4) for power in range(28, 44, 2)])
def test_no_way_as_good_for_the_loss_is_faster_by_more_than_its_worth(plan, topology, beta):
    made = plan(
        topology((1.0,) * 4, default=(1e-4, beta)), compression={"mode": "auto"}, parallel=fixed(dp=4), dims=LARGE
    )
    ways = compared(made)
    assert (1 - MIN_GAIN) * ways[made.codec.label].step_s <= min(each.step_s for each in ways.values())


@pytest.mark.parametrize("beta", [10.0**-power for power in range(7, 12)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_no_link_makes_it_slower_than_exact_sums_by_its_own_model(plan, topology, beta, nodes):
    made = plan(
        topology((1.0,) * nodes, default=(1e-4, beta)),
        compression=AUTO,
        parallel=fixed(dp=nodes),
        dims=LARGE,
        steps=500,
    )
    ways = compared(made)
    assert ways[made.codec.label].step_s <= ways["none"].step_s
    best = min(each.step_s for each in ways.values())
    assert ways[made.codec.label].step_s <= best / (1 - 0.1) ** 2


def test_a_run_that_is_over_before_its_warm_up_is_not_compressed_by_halves(run):
    for steps, warmup in ((20, 2), (10**6, 100)):
        candidates = candidate_codecs(steps, math.inf)
        lengths = [codec.warmup_steps for codec in candidates if hasattr(codec, "warmup_steps")]
        assert lengths == [warmup] * len([*LOW_RANKS, TOPK])


def test_measured_devices_decide_and_unmeasured_ones_are_said(plan, topology):
    asked = {"compression": AUTO, "parallel": fixed(dp=2), "dims": LARGE, "steps": 1000}
    note = "What compression takes was not measured on some devices; typical values stand in."
    assert note in plan(topology(default=SLOW), **asked).notes
    quick = CodecSeconds(bf16=1e-9, quantized=1e-7, topk=1e-12, power_sgd=2e-7)
    made = plan(topology(default=SLOW, codec_s=quick), **asked)
    assert note not in made.notes
    assert made.codec.mode == "topk", "low rank is slow on these devices"
    assert compared(made)["power_sgd"].processor_s == pytest.approx(2e-7 * 25_829_888, rel=0.01)


def test_narrow_matrices_are_not_of_low_rank(plan, topology):
    made = plan(topology(default=SLOW), compression=AUTO, parallel=fixed(dp=2), dims={"dim": 4, "heads": 2}, steps=500)
    assert compared(made)["power_sgd"].step_s is None
    assert "does not shrink to 1/2" in compared(made)["power_sgd"].verdict


def test_a_sharded_state_is_summed_number_by_number_or_between_its_copies(plan, topology):
    asked = {"compression": AUTO, "dims": LARGE, "steps": 10_000}
    whole = plan(topology(default=SLOW), parallel=fixed(dp=2, zero=2), **asked)
    assert whole.codec.mode in Quantized.modes(), "some of the messages pass beside the backward"
    assert compared(whole)["power_sgd"].verdict.startswith("zero 2 over all replicas: its messages bring sums to all")
    assert "slower than int4" in compared(whole)[TOPK].verdict
    several = plan(topology(default=SLOW), parallel=fixed(dp=2, zero=2, micro_batch=2), **asked)
    assert "for each micro-batch" in compared(several)[TOPK].verdict
    scaled = plan(topology(default=SLOW), parallel=fixed(dp=2, zero=1), precision="fp16", **asked)
    assert scaled.codec.mode == "rotated_int4", "keeps nothing that an overflow could spoil"
    assert "overflows" in compared(scaled)["int4"].verdict
    two = topology((1, 1), devices=2, default=SLOW)
    copies = plan(two, parallel=fixed(dp=4, zero=1, shard="node"), **asked)
    assert (copies.shards, copies.codec.mode) == (2, "power_sgd")
    one = plan(topology(), compression=AUTO, parallel=fixed(pp=2))
    assert one.compression[0].reason == "there is one replica, so no gradients are summed"


def test_replicas_are_chosen_where_only_compression_makes_them_fast(plan, topology):
    """Messages between stages are large beside the gradients of a narrow model with many rows."""
    asked = {"dims": {"layers": 4, "dim": 256, "heads": 4}, "rows": 64, "seq_len": 512, "steps": 100_000}
    slow = topology(default=(1e-4, 8e-7))
    exact = plan(slow, compression={"mode": "none"}, **asked)
    made = plan(slow, compression=AUTO, **asked)
    assert compared(made)[made.codec.label].step_s < 0.9 * exact.predicted.step_time_s["total"]
    assert (exact.dp, made.dp, made.codec.mode) == (1, 2, "int4")


WHOLE = {"layers": 1, "dim": 1024, "heads": 1, "vocab": 8192}
"""One block with one head: neither stages nor tensor parallelism."""


def test_memory_is_saved_by_what_goes_with_the_codec(plan, topology, run):
    tight = topology((1,) * 8, memory=1.253e9, default=SLOW)
    asked = {"dims": WHOLE, "rows": 8, "steps": 1000}
    made = plan(tight, compression=AUTO, **asked)
    assert (made.zero, made.shards, made.codec.mode) == (1, 8, "rotated_int4")
    with pytest.raises(RefusedError, match=r"or compression.mode bf16, which keeps nothing"):
        plan(tight, compression={"mode": "topk"}, **asked)

    wanted = run(compression={"mode": "topk"}, **asked)
    work, _ = workload_of(wanted, wanted.spec())
    pool = make_device_pool(wanted, topology((1, 1), devices=2))
    search = SearchSpace(pool, CostModel(work, pool.links))
    placement = Placement((unit,) for unit in make_tensor_parallel_groups(pool, 1))
    assert not search.with_work(memory_options=MemoryOptions(zero=1)).can_shard(placement)
    assert search.with_work(memory_options=MemoryOptions(zero=1, shard="node")).can_shard(placement)
    for codec in (Bf16(mode="bf16"), Quantized(mode="int8")):
        assert search.with_work(codec=codec).with_work(memory_options=MemoryOptions(zero=1)).can_shard(placement)


def test_a_plan_that_is_read_back_is_predicted_with_its_codec(plan, topology, run):
    asked = {"compression": AUTO, "parallel": fixed(dp=2), "dims": LARGE, "steps": 1000}
    there = topology(default=SLOW)
    made, wanted = plan(there, **asked), run(**asked)
    scene = layout_of_plan(wanted, wanted.spec(), made, there)
    assert predict(scene.cost, scene.layout, whole=True).total == pytest.approx(made.predicted.step_time_s["total"])


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            AUTO,
            [
                "Ways to sum gradients, in the order in which they are tried",
                r"\+1 %",  # the gap of rotated_int3
                "compression power_sgd: a mean step of",
            ],
        ),
        (
            {"mode": "auto", "loss_budget": 0.015},
            [
                r"compression mixed: a mean step of .*; predicted loss gap 1\.\d+ %, allowed 1.5 %",
                r"attention: rotated_int4, predicted gap [\d.]+ % of the parameters × 0 % = 0 %; rotated_int3 would",
            ],
        ),
        (
            {"mode": "mixed", "groups": [{"mode": "int4", "layers": "attention"}]},
            ["compression embedding_head none, attention int4, feed_forward none, which the planner did not choose"],
        ),
    ],
    ids=["lossy", "loss_budget", "by hand"],
)
def test_the_command_explains_the_choice(topology, run, tmp_path, settings, lines):
    topology(default=(2e-4, 8e-7)).write(tmp_path / "topology.json")
    asked = run(compression=settings, parallel=fixed(dp=2), dims=LARGE, steps=10_000)
    (tmp_path / "run.yaml").write_text(asked.model_dump_json(by_alias=True, exclude_none=True))
    files = ["--topology", str(tmp_path / "topology.json"), "-o", str(tmp_path / "p.json")]
    done = CliRunner().invoke(command, [str(tmp_path / "run.yaml"), *files, "--explain"])
    assert done.exit_code == 0, done.output
    for line in lines:
        assert re.search(line, " ".join(done.output.split())), done.output
