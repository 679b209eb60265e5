"""The comparison with published runs, on small tables made by hand, and the arithmetic of its scores."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_rows import DEEPSPEED, NOTHING, SHARDED_STATE, scenes, write

from hpctrain.base.errors import FileError, InputError
from hpctrain.bench.comparison import errors_of
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ModelPart
from tools.published_runs.__main__ import main
from tools.published_runs.data_sheets import (
    gpu_of,
    gpus_of,
    inter_node_bytes_per_s,
    intra_node_bytes_per_s,
    stated_bytes_per_s,
)
from tools.published_runs.fit import PACKAGED, START, constants_by, fit, without_kind
from tools.published_runs.gpt_spec import GptSpec
from tools.published_runs.kinds import kind_errors, summary
from tools.published_runs.layer_profile import LayerProfile, LayerTimes, ProfiledCostModel
from tools.published_runs.measure import data_files
from tools.published_runs.sailor import read_figures
from tools.published_runs.scenario import HALF, PublishedScenario, scene_of
from tools.published_runs.score import baseline, rankings
from tools.published_runs.table import COLUMNS, read_runs, read_tables


def test_the_published_formula_of_activations_is_met() -> None:
    """Korthikanti et al. 2022, equation (2): sbh(10 + 24/t + 5as/(ht)) bytes a layer in fp16."""
    spec = GptSpec(layers=2, dim=1024, heads=16, ffn_dim=4096, vocab=512, positions=256)
    for tp in (1, 2, 4, 8):
        expected = 256 * 3 * 1024 * (10 + 24 / tp + 5 * 16 * 256 / (1024 * tp))
        assert spec.activation_bytes(3, 256, tp, 2) == pytest.approx(expected)


def test_gpus_and_rates_are_read_from_their_columns() -> None:
    assert [gpu_of(text) for text in ("16xT4-16 (4x g4dn)", "A100-80GB-SXM", "4xGH-96", "Z9")] == [
        "T4", "A100", "GH-96", None,
    ]  # fmt: skip
    assert gpus_of("2xV100+1xT4") == ["V100", "V100", "T4"]
    assert gpus_of("2xV100+1xZ9") is None
    assert stated_bytes_per_s("8x HDR IB 200Gb/s per node") == 8 * 25e9
    assert stated_bytes_per_s("800 Gb/s per node (config inter_node_bandwidth=800)") == 100e9
    assert intra_node_bytes_per_s("PCIe 50 Gb/s as coded") == 6.25e9
    assert inter_node_bytes_per_s("100 Gb/s per node") == pytest.approx(0.77 * 12.5e9)
    assert inter_node_bytes_per_s("4x Omni-Path links per node (100 Gb/s each assumed)") == 4 * 40.55e9 / 8
    assert inter_node_bytes_per_s("one node") is None
    assert intra_node_bytes_per_s("NVLink in 4-GPU nodes (document says 100 Gb/s)") is None


def test_twice_the_batch_takes_longer_and_a_failed_run_has_no_time(tmp_path: Path) -> None:
    short, long, failed = scenes(tmp_path, {}, {"global_batch": "32"}, {"iter_time_s": ""})
    constants = constants_by(PACKAGED)
    assert short.step_s(constants) < long.step_s(constants) < 2 * short.step_s(constants)
    assert failed.run.step_s is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "4xZ9"}, "there is no data sheet of '4xZ9'"),
        ({"num_gpus": "8"}, "pp 2 × dp 2 × tp 1 is not its 8 GPUs"),
        ({"global_batch": "18"}, "18 sequences do not go into 2 replicas with micro-batches of 2"),
        ({"plan_detail": "layer cuts (30 pipeline units) [0, 30]"}, "its stages hold [12] blocks"),
        ({"gpus_per_node": "4 (2 nodes)"}, "its nodes do not add up to its 4 GPUs"),
        ({"gpus_per_node": "some"}, "its nodes do not add up to its 4 GPUs"),
        ({"inter_node": "5 Gb/s within a site, 1.2 Gb/s across"}, "its network has several rates"),
        ({"notes": "cp=2"}, "it splits sequences over GPUs"),
        ({"notes": "cp=1 | ODD: slower than others"}, "the table says that it is suspect"),
        ({"notes": "random placement (seeded)"}, "the table does not state where its ranks were"),
    ],
)
def test_a_run_that_cannot_be_described_says_why(tmp_path: Path, fields: dict[str, str], reason: str) -> None:
    [run] = read_runs(write(tmp_path / "runs.csv", [fields]))
    found = scene_of(run, NOTHING)
    assert isinstance(found, str)
    assert found.startswith(reason)


FSDP = {
    "source": "llm-foundry FSDP H100-80GB (README.md)", "framework": "llm-foundry (Composer + PyTorch FSDP)",
    "gpu": "H100-80GB-SXM", "num_gpus": "8", "vocab": "50368", "global_batch": "64", "pp": "1", "dp": "8", "zero": "3",
    "dtype": "bf16", "notes": "kv_heads=4; gated_ffn=1; tied_embeddings=0; cp=1 | fsdp_mixed_precision=DEFAULT",
}  # fmt: skip
CLASSIFIER = {
    "source": "DT-FM slow networks (results)", "framework": "Megatron-LM (DT-FM runs)", "gpu": "V100-16GB",
    "num_gpus": "6", "gpus_per_node": "2 (2 nodes) and 1 (2 nodes)", "inter_node": "delay 50ms bandwidth 1Gbps",
    "vocab": "", "global_batch": "12", "pp": "3", "schedule": "GPipe", "recompute": "",
}  # fmt: skip


def last_parameters(scene: PublishedScenario) -> int:
    """Return the parameters of the last stage, which the logits make the fullest."""
    return scene.work.parameters(scene.layout.model_parts[-1], 1)


def test_times_of_a_host_that_waits_for_each_kernel_add_to_those_of_the_device(tmp_path: Path) -> None:
    [waiting] = scenes(tmp_path, SHARDED_STATE)
    ahead = replace(waiting, run=replace(waiting.run, family="vTrain multi-node"))
    constants = constants_by(PACKAGED)
    assert ahead.step_s(constants) < waiting.step_s(constants) == ahead.step_s(replace(constants, overlap_power=1.0))


def test_deepspeed_sums_in_fp32_in_bf16_and_sends_more_than_a_reduce_scatter(tmp_path: Path) -> None:
    row, constants = DEEPSPEED | {"num_gpus": "8", "dp": "4"}, constants_by(PACKAGED)
    half, brain = scenes(tmp_path, row, row | {"dtype": "bf16"})
    sums = [(scene.work.framework.summed_bytes, scene.work.framework.sharded_sum_factor) for scene in (half, brain)]
    assert sums == [(2, 4 / 3), (4, 2)]
    assert half.step_s(constants) < brain.step_s(constants)


def test_the_optimizers_of_deepspeed_need_buffers_for_an_update(tmp_path: Path) -> None:
    [scene] = scenes(tmp_path, DEEPSPEED | {"zero": ""})
    framework = replace(scene.work.framework, state_bytes=HALF.state_bytes)
    without = replace(scene, work=replace(scene.work, framework=framework))
    assert scene.memory_bytes() - without.memory_bytes() == pytest.approx(8 * last_parameters(scene))
    # Rajbhandari et al. 2020, section 5.1: with ZeRO 1, 2 + 2 + 12/n bytes a parameter; 8/n are those of the buffers.
    two, eight = scenes(
        tmp_path,
        *(DEEPSPEED | {"dp": str(dp), "num_gpus": str(2 * dp), "global_batch": str(8 * dp)} for dp in (2, 8)),
    )
    sharded_bytes = (12 + 8) * (1 / 2 - 1 / 8) * last_parameters(two)
    assert two.memory_bytes() - eight.memory_bytes() == pytest.approx(sharded_bytes)
    # The gradients in fp32 and the buffer of all gathered weights, less the buffers of an update in fp16.
    [brain] = scenes(tmp_path, DEEPSPEED | {"dtype": "bf16"})
    assert brain.memory_bytes() - two.memory_bytes() == pytest.approx((4 + 2 - 8 / 2) * last_parameters(two))


def test_embedding_and_head_count_as_a_layer_where_stages_are_then_equal(tmp_path: Path) -> None:
    rows = (SHARDED_STATE | {"pp": "4", "dp": "1", "layers": layers} for layers in ("10", "12", "13"))
    counts = [scene.layout.blocks for scene in scenes(tmp_path, *rows)]
    assert counts == [(2, 3, 3, 2), (3, 3, 3, 3), (4, 4, 4, 1)], "else DeepSpeed fills stage after stage"


def test_plans_for_other_models_and_on_other_nodes_are_no_search(tmp_path: Path) -> None:
    rows = [{}, {"micro_batch": "1"}, {"heads": "32"}, {"dtype": "bf16"}, {"notes": "before the PCIe/NUMA fix"}]
    first, same, *others = [scene.run.search for scene in scenes(tmp_path, *rows)]
    assert first == same
    assert len({first, *others}) == 1 + len(others)


def test_fully_sharded_runs_are_read_with_their_notes(tmp_path: Path) -> None:
    [scene] = scenes(tmp_path, FSDP)
    assert (scene.layout.shards, scene.work.memory_options.zero, scene.work.gathered_bytes) == (8, 3, 2)
    assert (scene.run.kind, scene.work.framework.gradient_bytes) == ("llm-foundry, H100-80GB, llm-foundry", 4)
    assert (scene.work.spec.key_value_heads, scene.work.spec.tied) == (4, False)
    dim, ffn = 1024, 4096
    assert scene.work.spec.block_weights == 2 * dim * (dim + dim // 4) + 3 * dim * ffn
    [pure] = scenes(tmp_path, FSDP | {"notes": "fsdp_mixed_precision=PURE"})
    assert pure.work.framework.gradient_bytes == 2
    scores = [scene.work.spec.selective_bytes(1, 1024) for scene in (*scenes(tmp_path, {}), pure)]
    assert scores[0] > scores[1] == 0, "fused attention keeps no scores"


def test_collectives_of_sharding_overlap_where_the_framework_prefetches(tmp_path: Path) -> None:
    [scene] = scenes(tmp_path, FSDP)
    constants = constants_by(PACKAGED)
    serial = replace(scene, work=replace(scene.work, framework=replace(scene.work.framework, shard_prefetch=False)))
    alone = replace(scene, work=replace(scene.work, memory_options=replace(scene.work.memory_options, zero=0)))
    assert alone.slower(0.9).step_s(constants) < scene.step_s(constants) < serial.step_s(constants)


def test_fused_attention_takes_longer_than_its_flops_with_long_sequences(tmp_path: Path) -> None:
    rows = (
        {**FSDP, "seq": str(length), "global_batch": str(2**20 // length), "micro_batch": "1"}
        for length in (2**10, 2**14)
    )
    for scene, least in zip(scenes(tmp_path, *rows), (1.0, 1.2), strict=True):
        free = constants_by(dict(PACKAGED) | {"attention_passes": 1e-9})
        assert scene.step_s(constants_by(PACKAGED)) > least * scene.step_s(free)


def test_heads_whose_width_is_no_multiple_of_8_do_not_use_tensor_cores() -> None:
    def flops(heads: int, **fields: bool) -> float:
        spec = GptSpec(layers=1, dim=1080, heads=heads, ffn_dim=4320, vocab=512, positions=256, **fields)
        return spec.selective_flops(1, 256)

    assert flops(10) == 16 * flops(9), "widths of 108 and 120"
    assert flops(10, fused=True) == flops(10, plain=True) == flops(9)


def test_one_step_of_a_kind_removes_what_all_its_runs_have_in_common(tmp_path: Path) -> None:
    constants, kind = constants_by(PACKAGED), {"source": "BigScience 176B (chronicles)", "gpu": "A100-80GB-SXM"}
    rows = [{"id": f"b{size}", "micro_batch": str(size), **kind} for size in (1, 2, 4, 8)]
    made = [scene.slower(1.5) for scene in scenes(tmp_path, *rows)]
    told = [{**row, "iter_time_s": f"{scene.step_s(constants):.6f}"} for row, scene in zip(rows, made, strict=True)]
    kinds, problems, ratios = kind_errors(scenes(tmp_path, *told), lambda text: None)
    [(name, found)] = kinds.items()
    assert name == "BigScience, A100-80GB, Megatron"
    assert found.bias < -25
    assert found.one_step < found.worst_step + 1e-9 < 0.1
    assert problems == {"BigScience on 4": (pytest.approx(found.free), pytest.approx(found.one_step))}
    assert 1.3 < min(ratios.values()) <= max(ratios.values()) < 1.6
    record = summary(kinds | {"mixed": replace(found, one_step=math.nan, worst_step=math.nan)})
    assert record["by_kind"]["mixed"]["one_step"] is None
    assert record["one_step"] == {"median": found.one_step, "worst": found.one_step}


def test_recomputation_that_the_table_does_not_state_is_what_memory_needs(tmp_path: Path) -> None:
    small, large = scenes(tmp_path, CLASSIFIER, CLASSIFIER | {"seq": "8192"})
    assert (small.work.memory_options.recompute, large.layout.memory_options.recompute) == ("none", "full")


def test_nodes_of_several_sizes_a_model_without_head_and_sharded_state_are_read(tmp_path: Path) -> None:
    uneven, sharded, plain = scenes(tmp_path, CLASSIFIER, SHARDED_STATE, SHARDED_STATE | {"zero": ""})
    nodes = [
        device.node for row in zip(*uneven.layout.placement, strict=True) for unit in row for device in unit.devices
    ]
    assert nodes == ["node0", "node0", "node1", "node1", "node2", "node3"]
    assert uneven.layout.schedule == "gpipe"
    first, _, last = (uneven.layout.unit(0, stage).device_ids[0] for stage in range(3))
    assert uneven.links.between(first, last)[0] == 0.05
    assert uneven.work.spec.logits_bytes(1, 1024) == 0
    assert (sharded.layout.shards, plain.layout.shards) == (2, 1)
    assert sharded.memory_bytes() < plain.memory_bytes()


def test_families_are_whole_words(tmp_path: Path) -> None:
    sources = ("AMP (NeurIPS22) src/results", "an example of others", "sailor/Planner", "assailor")
    runs = read_runs(write(tmp_path / "a.csv", [{"source": source} for source in sources]))
    assert [run.family for run in runs] == ["AMP", "an example of others", "Sailor", "assailor"]


@pytest.mark.parametrize(
    ("column", "text"),
    [("tp", ""), ("seq", "0"), ("layers", "2.5"), ("zero", "4"), ("iter_time_s", "-1"), ("schedule", "dualpipe")],
)
def test_a_field_that_cannot_be_read_is_named(tmp_path: Path, column: str, text: str) -> None:
    with pytest.raises(FileError, match=rf"cannot be read: {column}: found '{text}'; allowed: "):
        read_runs(write(tmp_path / "a.csv", [{column: text}]))


def test_all_tables_of_a_folder_are_read_and_each_run_once(tmp_path: Path) -> None:
    first = write(tmp_path / "measured_runs.csv", [{"id": "a"}])
    second = write(tmp_path / "measured_runs_2.csv", [{"id": "b"}])
    assert data_files(tmp_path) == [first, second]
    assert data_files(None, {"HPCTRAIN_DATA": str(tmp_path)}) == [first, second]
    assert data_files(second) == [second]
    assert [run.id for run in read_tables([first, second])] == ["a", "b"]
    with pytest.raises(FileError, match="a second time"):
        read_tables([first, first])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no table"):
        data_files(tmp_path / "empty")


def test_constants_are_found_again_from_runs_made_with_them(tmp_path: Path) -> None:
    rows = [
        {"micro_batch": str(size), "hidden": str(width), "ffn": str(4 * width), "pp": pp, "dp": dp}
        for size in (1, 4)
        for width in (1024, 4096)
        for pp, dp in (("2", "2"), ("1", "4"))
    ]
    truth = dict(PACKAGED) | {"efficiency": 0.7, "block_ops": 180.0}
    made = scenes(tmp_path, *rows)
    times = [str(scene.step_s(constants_by(truth))) for scene in made]
    told = scenes(tmp_path, *({**row, "iter_time_s": took} for row, took in zip(rows, times, strict=True)))
    found = constants_by(fit(told, PACKAGED, steps=10))
    for scene in told:
        assert scene.step_s(found) == pytest.approx(scene.run.step_s, rel=0.03)
    with pytest.raises(ValueError, match="no runs"):
        fit([])


def test_without_vtrain_no_run_says_how_much_the_host_hides(tmp_path: Path) -> None:
    """Steps that are longer than predicted do not lead a fit to a host that waits for its device."""
    vtrain, other = (
        {"source": "vTrain (MICRO24) data/ground_truth_multi.csv"},
        {"source": "Korthikanti et al. 2022 Table 5", "gpu": "A100-80GB-SXM"},
    )
    made = scenes(tmp_path, {"id": "a", **vtrain}, {"id": "b", **other, "iter_time_s": "9.0"})
    constants = without_kind(made, made[0].run.kind, lambda text: None)
    assert constants.overlap_power == START["overlap_power"]
    assert constants.efficiency < START["efficiency"], "it is fitted"


def test_measured_layers_take_the_place_of_the_roofline_where_there_are_any(tmp_path: Path) -> None:
    [scene] = scenes(tmp_path, {})
    unit, constants = scene.layout.unit(0, 0), {"cuda": constants_by(PACKAGED)}
    times = LayerTimes((1.0, 2.0), (0.25, 0.5), (0.125, 0.25), 0.0625)
    profile = LayerProfile({("A100", 1, 2): times})
    plain = CostModel(scene.work, scene.links, constants)
    measured, other = (ProfiledCostModel(scene.work, scene.links, constants, profile, size) for size in (2, 4))
    assert measured.module_times(unit, 2).whole_model(6) == 6 * 3.0 + 0.75 + 0.375
    assert measured.module_times(unit, 4) == plain.module_times(unit, 4), "another micro-batch was not measured"
    part = ModelPart(2, True, False)
    assert measured.optimizer_s(unit, part) == 3 * 0.0625
    assert other.optimizer_s(unit, part) == plain.optimizer_s(unit, part)


def test_profiles_take_the_place_of_the_roofline(tmp_path: Path) -> None:
    """A larger micro-batch that took less time shows that the smaller one was disturbed."""
    folder = tmp_path / "sailor_profiles"
    (folder / "M").mkdir(parents=True)

    def layers(block: float) -> dict[str, list[float]]:
        return {"0": [0.1, 0.0, 0.0], **{str(i): [block, 2 * block, 0.0] for i in (1, 2)}, "3": [0.1, 0.2, 0.0]}

    (folder / "M" / "GH-96.json").write_text(json.dumps({"1": {"1": layers(3.0)}, "2": {"1": layers(2.0)}}))
    (folder / "multizone_bandwidths_het.json").write_text(json.dumps({"us-central1-a": {}}))
    figures = read_figures(folder)
    times = figures.profiles["M"].at("GH-96", 1, 1)
    assert times is not None
    assert times.block == (2.0, 4.0)
    [run] = read_runs(
        write(
            tmp_path / "runs.csv",
            [{
                "source": "Sailor", "model": "M", "gpu": "1xGH-96", "num_gpus": "1", "layers": "2", "pp": "1",
                "dp": "1", "global_batch": "2", "micro_batch": "1", "dtype": "fp32", "recompute": "",
            }],
        )
    )  # fmt: skip
    scene = scene_of(run, figures)
    assert not isinstance(scene, str)
    assert scene.step_s(constants_by(PACKAGED)) == pytest.approx(2 * (2 * 6.0 + 0.1 + 0.3), rel=0.01)
    (folder / "M" / "GH-96.json").write_text("[]")
    with pytest.raises(InputError, match="sailor_profiles"):
        read_figures(folder)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_errors_are_relative_to_what_was_measured(pairs: list[tuple[float, float]]) -> None:
    found = errors_of([a for a, _ in pairs], [b for _, b in pairs])
    assert found.largest + 1e-9 >= found.mean >= abs(found.bias) - 1e-9
    exact = errors_of([b for _, b in pairs], [b for _, b in pairs])
    assert (exact.mean, exact.largest, exact.below) == (0, 0, 0)


def test_the_regret_is_that_of_the_plan_predicted_to_be_fastest(tmp_path: Path) -> None:
    times = ["1.0", "1.2", "2.0", "3.0", "4.0"]
    made = scenes(tmp_path, *({"id": f"r{i}", "iter_time_s": took} for i, took in enumerate(times)))
    [right] = rankings(made, {f"r{i}": float(i) for i in range(5)}).values()
    assert (right.rank_correlation, right.regret_pct) == pytest.approx((1.0, 0.0))
    [wrong] = rankings(made, {f"r{i}": float(-i) for i in range(5)}).values()
    assert (wrong.rank_correlation, wrong.regret_pct) == pytest.approx((-1.0, 300.0))
    assert rankings(made[:4], {f"r{i}": 1.0 for i in range(4)}) == {}, "too few plans to be put in order"
    assert baseline(made)["r0"] == pytest.approx(2.0), "one rate for all: the median"


def test_the_command_scores_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [("1", "0.30"), ("2", "0.22"), ("4", "0.24"), ("8", "0.40")]
    rows = [{"id": f"vtrain-single-{2 * i:04}", "micro_batch": a, "iter_time_s": b} for i, (a, b) in enumerate(sizes)]
    rows += [{"id": "odd", "gpu": "4xZ9"}, {"id": "bad", "notes": "SUSPECT-duplicate"}]
    path = write(tmp_path / "runs.csv", rows)
    main(["--data", str(path), "--json"])
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    [(problem, error)] = record["error_pct"]["by_problem"].items()
    assert (problem, record["error_pct"]["mean"]) == ("vTrain single node, width 1024", error)
    assert record["errors"][problem]["runs"] == 4
    assert set(record["left_out"]) == {"odd", "bad"}
    assert record["error_in_sample_pct"]["by_problem"] == {}, "none of these runs was fitted on"
    assert record["regret_pct"] is None
    assert "2 runs left out" in shown.err


def test_a_table_that_is_none_is_answered_with_what_is_missing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("HPCTRAIN_DATA", raising=False)
    with pytest.raises(SystemExit, match="--data"):
        main([])
    with pytest.raises(FileError, match="columns are missing: hidden"):
        read_runs(write(tmp_path / "a.csv", [{}], tuple(name for name in COLUMNS if name != "hidden")))
    with pytest.raises(FileError, match=r"b.csv:3: r1: cannot be read"):
        read_runs(write(tmp_path / "b.csv", [{"id": "r0"}, {"id": "r1", "tp": "two"}]))
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_runs(tmp_path / "missing.csv")
