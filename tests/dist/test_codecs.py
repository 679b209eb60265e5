"""Compressed gradients: sums as exact as the codec promises, the same on all ranks, in training that can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

from hpctrain.records.plan.compression import Bf16, Tagc, TopK
from hpctrain.records.plan.gradient_codec import GradientCodec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.plan.rotated import RotatedIntegers

INTEGERS = {mode: int(mode.removeprefix("int")) for mode in Quantized.modes()}
"""Mode -> bits."""
ROTATED = {mode: int(mode.removeprefix("rotated_int")) for mode in RotatedIntegers.modes()}
SPARSE_SCATTERS = ("warm-up and bf16", "values of int8", "profiles", "flush", "tagc", "tagc, sketch")
UP, QUERY, NORM = "layers.0.mlp.up.weight", "layers.0.attention.q.weight", "norm.weight"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(Path(__file__).with_name("codec_cases.py"), "all", 4, tmp_path_factory.mktemp("codecs"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "allowed"),
    [
        # One rounding of each of four numbers, and one of their sum, to 8 bits.
        ("bf16", {UP: 2**-7, QUERY: 2**-7, NORM: 1e-6}),
        ("bf16, without attention", {UP: 2**-7, QUERY: 1e-6, NORM: 1e-6}),
        # The same to a 127th of the largest number around with 8 bits, and what the step before has left of it.
        *((mode, dict.fromkeys((UP, QUERY), 2.0 ** (3 - bits)) | {NORM: 1e-6}) for mode, bits in INTEGERS.items()),
        # Of four roundings and that of their sum, each with an error of 0.1, 0.19 or 0.34 of a standard deviation.
        *((mode, dict.fromkeys((UP, QUERY), 6 * 2.0**-bits) | {NORM: 1e-6}) for mode, bits in ROTATED.items()),
        ("topk, all of it", {UP: 1e-6, QUERY: 1e-6, NORM: 1e-6}),
        ("tagc, all of it", {UP: 1e-6, QUERY: 1e-6, NORM: 1e-6}),
        # Both factors are rounded to 8 bits. Where rows are more than columns, rounding also turns the span of P, by as
        # much as the random Q of the first step is ill-conditioned; what this leaves out is in the residual.
        ("power_sgd, whole rank", {UP: 0.25, QUERY: 2**-6, NORM: 1e-6}),
    ],
)
def test_sums_are_as_exact_as_promised(codec: str, allowed: dict[str, float], found: dict[str, Any]) -> None:
    far = found[codec]["far"]
    assert all(far[name] <= allowed[name] for name in allowed), far
    assert found[codec]["differ"] == 0
    assert found[codec]["infinite seen by"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codec", "tolerance"),
    [
        ("bf16", Bf16(mode="bf16"), 1e-6),
        *((mode, Quantized(mode=mode), 1e-6) for mode in INTEGERS),
        *((mode, RotatedIntegers(mode=mode), 1e-6) for mode in ROTATED),
        # A rank does not send to itself, and sizes are exchanged before the numbers.
        ("topk, all of it", TopK(mode="topk", density=1, values="fp32"), 0.075),
        ("tagc, all of it", Tagc(mode="tagc", density=1), 1e-4),
        # Q of a matrix of 96 rows and 64 columns is smaller than P; the planner takes all matrices as square.
        ("power_sgd, whole rank", PowerSgd(mode="power_sgd", rank=64), 0.03),
    ],
)
def test_all_to_alls_carry_the_share_that_the_planner_assumes(
    name: str, codec: GradientCodec, tolerance: float, found: dict[str, Any]
) -> None:
    """Of all bytes but those of the norm, which travels by an exact all-reduce."""
    sent = found[name]["counted"]
    share = found[name]["all-to-all"] * sent / (sent - 1.5 * 4 * 64)
    assert share == pytest.approx(codec.all_to_all_share(4, 64), abs=tolerance)


@pytest.mark.slow
def test_bytes_of_bf16_are_half_of_the_ring(found: dict[str, Any]) -> None:
    """Four ranks: 2·3/4 of each matrix at two bytes a number, of the norm at four."""
    assert found["bf16"]["counted"] == 1.5 * (2 * (96 * 64 + 64 * 64) + 4 * 64)
    assert found["bf16, without attention"]["counted"] == 1.5 * (2 * 96 * 64 + 4 * (64 * 64 + 64))
    # Both matrices are a multiple of four parts of blocks of 256 numbers, each with a scale of four bytes.
    for mode, bits in INTEGERS.items():
        assert found[mode]["counted"] == 1.5 * ((96 * 64 + 64 * 64) * (bits / 8 + 4 / 256) + 4 * 64)
    for mode, bits in ROTATED.items():
        assert found[mode]["counted"] == 1.5 * ((96 * 64 + 64 * 64) * (bits / 8 + 2 / 256) + 4 * 64)
    assert found["bf16"]["calls"] == ["all_gather", "all_reduce", "all_to_all"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", *INTEGERS, "rotated_int3"])
def test_dense_sums_leave_beside_the_backward_pass_and_integers_keep_what_rounding_took(
    mode: str, found: dict[str, Any]
) -> None:
    case = found[f"dense, {mode}"]
    assert case["unequal"] == 0, "beside or behind the backward pass, resumed or in one go"
    first, *later = case["early"]
    assert first == 0
    # Three leave in any case; further ones if the messages of the first have arrived by then.
    assert min(later) > 2
    # The error of a rounding to 3 bits is 0.19 of the numbers: that of all summands together, and that of their sum.
    assert case["errors"] < {"bf16": 2**-7, "rotated_int3": 2 * 0.19}.get(mode, 1e-6)
    assert case["kept"] == (6 if mode in INTEGERS else 0)
    assert case["broken are finite"] == case["others are not"] == case["touched"] == 0
    if mode in INTEGERS:
        assert 0 < case["ratio"] < 2.5 / (2 ** (INTEGERS[mode] - 1) - 1)


@pytest.mark.slow
def test_codecs_by_layer_group_sum_as_a_reducer_for_each_group_does(found: dict[str, Any]) -> None:
    case = found["mixed"]
    assert case["unequal"] == 0, "beside or behind the backward pass, resumed or in one go"
    assert case["state"] == 0
    assert case["kept"] == case["kept alone"] != []
    assert all(".feed_forward." in name for name in case["kept"]), "the other groups have codecs without residuals"
    mixed, alone = case["bytes"]
    assert mixed < min(alone)
    assert 0 < case["ratio"] < 1


@pytest.mark.slow
def test_exact_sums_beside_the_backward_pass_stay_where_they_were_sent_from(found: dict[str, Any]) -> None:
    case = found["exact sums"]
    assert case["unequal"] == 0
    assert set(case["memories"]) == {5}, "one for each bucket, not one for each of twelve gradients"
    assert max(case["new memory"]) <= 1, "only a gradient that is a bucket of its own has other memory in each step"


@pytest.mark.slow
def test_gradients_of_a_sharded_state_travel_in_bf16(found: dict[str, Any]) -> None:
    """Zero 2 over all four replicas, two micro-batches: 3/4 of the model gathered, and 2 × 3/4 summed, at half."""
    case = found["sharded over all"]
    assert 0 < case["far"] <= 2**-7
    assert case["bytes"] == pytest.approx([0.75 + 2 * 0.75, 0.75 + 0.75], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "most"), [("bf16", 2**-7), ("int8", 2**-5), ("mixed", 2**-5)])
def test_stages_are_rounded_one_after_the_other(mode: str, most: float, found: dict[str, Any]) -> None:
    assert 0 < found[f"whole, four stages, {mode}"]["far"] <= most


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_sharded_state_gets_exact_sums_where_all_is_chosen(zero: int, found: dict[str, Any]) -> None:
    case = found[f"sharded, all of it, zero {zero}"]
    assert case["far"] <= 1e-6
    # Of every number that is not 0, 4 bytes, and a bit that says where it is; heads and sizes of the messages.
    assert case["bytes"][1] < case["bytes"][0] + 0.75 / 32 + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("codec", SPARSE_SCATTERS)
def test_what_a_sharded_sum_leaves_out_is_kept(codec: str, found: dict[str, Any]) -> None:
    case = found[codec]
    assert case["error"] < 1e-6
    assert case["unequal"] == 0
    # Where one rank's gradient is infinite, no sum of the part is a number, and nothing changes.
    assert case["infinite"] == case["others are finite"] == case["untouched"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bits"), INTEGERS.items())
def test_a_sharded_sum_of_integers_keeps_what_rounding_took(mode: str, bits: int, found: dict[str, Any]) -> None:
    case = found[f"parts, {mode}"]
    assert case["error"] < 1e-6
    assert case["unequal"] == 0
    assert case["representable"] == 0
    assert 0 < case["ratio"] < 2.5 * 2.0**-bits
    assert case["density"] == [None] * 6
    # Where one rank's gradient is infinite, no sum of the part is a number, and nothing changes.
    assert case["infinite"] == case["others are finite"] == case["untouched"] == 0
    # To three owners: of each part a flag and the exact numbers in fp32, and the others in blocks of 256 with a scale.
    blocks = -(-(23 * 200 + 16 * 90) // 256) + -(-33 * 64 // 256)
    sent = 3 * (4 * (1 + 16) + 4 * 16 + 4 + blocks * (4 + 256 * bits // 8))
    assert case["sent"] == [sent] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["none", "bf16", *INTEGERS, "rotated_int3", "none by level", "int4 by level", *SPARSE_SCATTERS]
)
def test_a_sharded_sum_that_goes_on_is_the_one_that_the_rank_waits_for(case: str, found: dict[str, Any]) -> None:
    here = found[f"in flight, {case}"]
    assert here["differ"] == 0
    assert here["residuals differ"] == []
    # A sum on its own in a step that flushes drops one of three.
    sparse = 2 if case == "flush" else 3
    assert here["residuals"] == (sparse if case in SPARSE_SCATTERS else 2 if case.startswith("int") else 0)
    assert here["infinite"] == [0, 1, 0, 0], "some rank saw it in step 1"
    assert here["under way"] == 2
    assert here["error"] == "a rank is lost"
    assert here["touched"] == []


@pytest.mark.slow
def test_a_lost_rank_ends_the_sums_on_their_way_and_is_named(found: dict[str, Any]) -> None:
    here = found["lost rank"]
    assert here["error"] in ("RuntimeError", "DistBackendError")
    assert (here["operation"], here["waits"]) == ("sum gradients", True)
    assert here["residual"] is False


@pytest.mark.slow
def test_a_sharded_sum_of_rotated_integers_drops_what_rounding_took(found: dict[str, Any]) -> None:
    case = found["parts, rotated_int3"]
    # Three of four summands are rounded, with an error of 0.19 of their numbers.
    assert 0.05 < case["error"] < 0.25
    assert case["unequal"] == 0
    assert case["ratio"] is None
    assert case["infinite"] == case["others are finite"] == case["untouched"] == 0
    # As with plain integers; pairs of blocks of 256, each with a scale of two bytes.
    pairs = -(-(23 * 200 + 16 * 90) // 512) + -(-33 * 64 // 512)
    assert case["sent"] == [3 * (4 * (1 + 16) + 4 * 16 + 4 + pairs * 2 * (2 + 96))] * 6


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "far", "sums"), [(1, 0.2, 0.129), (3, 0.02, 2 * 0.254)])
def test_a_sharded_state_is_summed_by_integers(zero: int, far: float, sums: float, found: dict[str, Any]) -> None:
    """Each of the two micro-batches of level 3 by itself: what the first leaves goes with the second. 7 % of the
    model is too small to be compressed."""
    case = found[f"integers, zero {zero}"]
    assert 0 < case["far"] <= far
    gathered = case["bytes"][0] - 0.75 * (1 if zero == 1 else 2)
    assert gathered + 0.75 * sums < case["bytes"][1] < gathered + 0.75 * sums + 0.09


@pytest.mark.slow
def test_bytes_of_sparse_sums_follow_their_density(found: dict[str, Any]) -> None:
    """Four ranks own 23·200 + 16 + 16·90, 16 and 33·64 numbers; each gets them from three others."""
    owned, small = 23 * 200 + 16 + 16 * 90, 16
    exact = 3 * (4 * (owned + small + 33 * 64) + 2 * 8)
    assert found["warm-up and bf16"]["sent"][0] == exact
    assert found["flush"]["density"][3] == 1
    assert [share == 1 for share in found["profiles"]["density"]] == [True, True, False, False, False, False]
    first, *later = found["warm-up and bf16"]["density"]
    assert first == 1
    assert all(abs(share - 0.1) < 0.02 for share in later)
    # At 10 %: two bytes a value and a bit or a byte for its place; 16 numbers twice in fp32; four heads and sizes.
    numbers = owned + 33 * 64
    for sent in found["warm-up and bf16"]["sent"][1:]:
        assert 3 * numbers * 0.28 < sent < 3 * (numbers * 0.35 + 2 * small * 4 + 200)


@pytest.mark.slow
def test_only_what_copies_exchange_is_compressed_where_nodes_share_a_state(found: dict[str, Any]) -> None:
    """Zero 1 in pairs: half of the model gathered and summed within the pair, a half all-reduced between pairs."""
    case = found["sharded in pairs"]
    plain, compressed = case["bytes"]
    assert 0 < case["far"] <= 2**-7
    assert plain == pytest.approx(1.5, rel=1e-6)
    # Half of the 0.5 between pairs, but for what is too small to be compressed.
    assert 1.25 < compressed < 1.35


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "far", "within", "between"),
    [
        # Of the whole model a half is scattered within the node and a half gathered. Half of it goes to the other node
        # and as much comes back: an eighth of 0.5 in int4, or 0.5 in full.
        ("exact, int4", 0.2, 1.0, (0.129 / 2, 0.16)),
        ("bf16, power_sgd", 1.0, 0.5, (0.01, 0.13)),
        # A shard needs only the sums of its own numbers, so nothing is gathered.
        ("bf16, exact, zero 1", 2**-7, 0.25, (0.25, 0.25)),
        # Two micro-batches, each summed by itself.
        ("exact, int8, zero 3", 0.02, 1.0, (2 * 0.254 / 4, 0.16)),
        # Within a node all weights are gathered too, once a step.
        ("bf16, bf16, zero 2, hybrid", 2**-6, 0.5 + 2 * 0.25, (0.25, 0.31)),
        ("bf16, mixed, zero 2, hybrid", 2**-6, 0.5 + 2 * 0.25, (0.25, 0.31)),
    ],
)
def test_a_node_sends_what_it_has_summed(
    case: str, far: float, within: float, between: tuple[float, float], found: dict[str, Any]
) -> None:
    here = found[f"by level, {case}"]
    assert 0 < here["far"] <= far
    assert here["levels"][0] == pytest.approx(within, rel=1e-3)
    assert between[0] <= here["levels"][1] * (1 + 1e-9) <= between[1] + 1e-9
    # Level 3 gathers the weights before each forward and each backward pass of the two micro-batches.
    gathered = 0.75 * {"zero 1": 1, "zero 3": 4}.get(case.rsplit(", ", 1)[1], 0)
    assert here["bytes"][1] == pytest.approx(gathered + sum(here["levels"]), rel=1e-6)


@pytest.mark.slow
def test_the_bench_measures_the_links_within_nodes_and_sums_by_the_levels_of_the_plan(found: dict[str, Any]) -> None:
    case = found["bench, auto"]
    assert [tuple(level) for level in case["levels"]] == [("intra_node", "none"), ("inter_node", "int4")]
    sent_bytes, named_bytes = case["bytes"]
    assert sent_bytes == named_bytes > 0
    assert case["same sums"]


@pytest.mark.slow
def test_a_sum_between_nodes_keeps_what_rounding_took(found: dict[str, Any]) -> None:
    case = found["dense, int4, by level"]
    assert case["unequal"] == 0, "resumed or in one go"
    assert case["errors"] < 1e-6
    assert case["kept"] == 6
    assert case["broken are finite"] == case["others are not"] == case["touched"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["low rank", "adaptive", "sharded", "integers, sharded"])
def test_a_resumed_run_goes_on_with_what_was_not_sent(codec: str, found: dict[str, Any]) -> None:
    case = found[codec]
    assert case["resumed"]["losses"] == case["straight"]["losses"]
    assert case["resumed"]["dropped"] == [None, None]
    assert case["straight"]["kept"] > 1
    assert case["missing"] == []
    assert case["unequal"] == 0
    first, *later = case["straight"]["dp"]
    if codec == "integers, sharded":
        assert later == [first] * 3, "there is no warm-up"
        assert all(0 < row["residual_norm_ratio"] < 0.01 for row in case["resumed"]["figures"])
    else:
        # Of what is sent for a sharded state, half are weights.
        assert max(later) < first * (0.75 if codec == "sharded" else 0.5)


@pytest.mark.slow
def test_rows_tell_what_was_sent(found: dict[str, Any]) -> None:
    """One step of warm-up is dense; afterwards at most 30 % of a layer is sent, and less than 5 % where fewer numbers
    differ from zero, as in the embedding; the rest is kept back."""
    assert all(0 < row["residual_norm_ratio"] < 4 for row in found["low rank"]["straight"]["figures"][1:])
    warm_up, *figures = found["adaptive"]["straight"]["figures"]
    assert warm_up["density"] == 1
    assert all(0.01 < row["density"] <= 0.3 * 1.1 for row in figures), figures
    assert all(0 < row["residual_norm_ratio"] < 4 for row in figures), figures


@pytest.mark.slow
def test_another_layout_of_ranks_drops_it_and_says_so(found: dict[str, Any]) -> None:
    first, second = found["moved"]["dropped"]
    assert first is None
    assert second.startswith("the checkpoint of step 2 is of another layout of ranks")
    assert found["moved"]["losses"][:2] == found["low rank"]["straight"]["losses"][:2]
    assert len(found["moved"]["losses"]) == 4


@pytest.mark.slow
def test_replicas_on_their_own_send_nothing_until_they_meet(found: dict[str, Any]) -> None:
    case = found["local steps"]
    sent = case["straight"]["dp"]
    assert [value > 0 for value in sent] == [False, True, False, True]
    # Up to the meeting and the first loss after it, a checkpoint in between changes nothing.
    assert case["resumed"]["losses"][:3] == case["straight"]["losses"][:3]
    assert case["resumed"]["dropped"] == [None, None]


@pytest.mark.slow
def test_a_step_that_overflows_in_fp16_leaves_what_is_kept_alone(found: dict[str, Any]) -> None:
    """The gradient overflows in one stage first; the reducers of the other stage must not count the step either."""
    case = found["fp16"]
    assert case["skipped"][0] is True
    assert case["skipped"][-1] is False
    assert case["counted"] == case["skipped"].count(False)
    assert case["finite"]


@pytest.mark.slow
def test_messages_between_stages_are_as_near_and_as_short_as_promised(found: dict[str, Any]) -> None:
    cases = {name: case for name, case in found.items() if name.startswith("messages, ")}
    assert len(cases) == 5
    for name, case in cases.items():
        assert case["sent"] == case["expected"], name
        # Of each number 2^-9 in bf16, or half of a 127th of the largest around it, at three boundaries there and back.
        assert 0 < case["gradient"] < 2e-2, name
        assert case["loss"] < 1e-3, name
        assert case["unequal"] == 0, name
        assert case["validation"] == 0, f"{name}: evaluation sends all in full"
