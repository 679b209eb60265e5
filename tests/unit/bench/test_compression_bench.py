"""`hpctrain bench compression`: turns, counters and rows; the figures themselves are not judged here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from forked_python import ForkedRunner

from hpctrain.base.errors import CommandError
from hpctrain.base.process import SystemRunner
from hpctrain.bench.compression.launch import LaunchResult, LaunchSettings, LaunchSpec, Samples, run_scene
from hpctrain.bench.compression.rank import CORPUS_FOLDER
from hpctrain.bench.compression.step_times import local_site, measure_site
from hpctrain.cli.bench.group import bench_command as command
from hpctrain.launch.small_run import make_corpus
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.integers import Quantized

SMALL = LaunchSettings(
    steps=2, block_steps=2, warm_steps=3, seq_len=16, spec=DecoderSpec(layers=2, dim=64, heads=2, vocab=320)
)


def test_a_scene_and_what_it_gave_come_back_from_their_files(tmp_path: Path) -> None:
    scene = LaunchSpec(2, "eth0", ("none", "dense"), SMALL)
    scene.write(tmp_path)
    assert LaunchSpec.read(tmp_path) == scene
    outcome = LaunchResult(10, 1.05, {"none": Samples([0.1], [0.2], [3.0], None, None)})
    outcome.write(tmp_path)
    assert LaunchResult.read(tmp_path) == outcome


FAMILIES = [
    "none", "ddp_fp32", "ddp_bf16", "powersgd_r4", "fsdp2_fp32", "dense", "bf16", "int4", "power_sgd_r4", "topk_10",
    "tagc_2x", "adaptive_paper", "adaptive", "auto", "local_steps", "fsdp2_dense", "fsdp2_sparse", "fsdp2_int4",
    "pp_fp32", "pp_int8",
]  # fmt: skip
"""One method of each kind; the others differ in a number."""


@pytest.mark.slow
def test_every_method_has_its_turns(tmp_path: Path) -> None:
    make_corpus(tmp_path / CORPUS_FOLDER)
    with local_site(2) as place:
        rows = {row.method: row for row in measure_site(ForkedRunner(), place, FAMILIES, SMALL, tmp_path)}
    assert list(rows) == FAMILIES
    assert {(row.nodes, row.link, row.steps) for row in rows.values()} == {(2, "loopback", 2)}
    for row in rows.values():
        assert 0 < row.step_time_low_s <= row.step_time_s <= row.step_time_high_s
        assert row.loss is not None
    # Of two ranks each sends as many numbers as there are parameters.
    assert rows["ddp_fp32"].counted_bytes_per_parameter == rows["dense"].counted_bytes_per_parameter == 4
    assert rows["ddp_bf16"].counted_bytes_per_parameter == 2
    # Other traffic on the loopback makes the interface's bytes more, and also the share of headers that is measured.
    on_interface = {name: row.bytes_per_parameter * row.header_factor for name, row in rows.items()}
    assert on_interface["ddp_fp32"] > 3.9
    assert rows["bf16"].counted_bytes_per_parameter == pytest.approx(2, rel=0.02)
    assert rows["int4"].counted_bytes_per_parameter == pytest.approx(0.53, rel=0.1)
    assert abs(rows["int4"].loss - rows["dense"].loss) < 0.1  # type: ignore[operator]
    # A sharded weight is gathered twice, and its gradient sent once; the root's and small parts are padded.
    assert rows["fsdp2_dense"].counted_bytes_per_parameter == pytest.approx(6, rel=0.1)
    # Weights once in bf16, and 10 % of the gradients at about 3 bytes each; beside what is too small for either.
    assert 1.1 < rows["fsdp2_sparse"].counted_bytes_per_parameter < 1.3  # type: ignore[operator]
    # The same weights, and half of the gradients' numbers at 0.516 bytes.
    assert 1.25 < rows["fsdp2_int4"].counted_bytes_per_parameter < 1.45  # type: ignore[operator]
    compressed = [name for name in rows if name.startswith(("power_sgd", "topk", "tagc", "adaptive"))]
    assert len(compressed) == 5
    for name in compressed:
        counted = rows[name].counted_bytes_per_parameter
        assert counted is not None
        assert counted < 4, f"{name} sends less than fp32"
        assert on_interface[name] > 0.9 * counted, "no method sends less than it says"
    assert {row.choice for name, row in rows.items() if name != "auto"} == {None}
    planned_s = rows["auto"].planned_step_s
    assert planned_s is not None
    assert list(planned_s) == ["none", "bf16", *Quantized.modes()]
    # A loopback that is busy may be slow enough to be worth rounding.
    near = 1e-4 if rows["auto"].choice == "none" else 0.1
    assert rows["auto"].loss == pytest.approx(rows["dense"].loss, abs=near)
    # Two micro-batches of 16 tokens; each rank sends a message for each, of 64 numbers a token.
    parameters = SMALL.spec.parameters()
    for name, each in (("pp_fp32", 4), ("pp_int8", 1 + 4 / 256)):
        assert rows[name].counted_bytes_per_parameter == pytest.approx(2 * 16 * 64 * each / parameters)
        assert rows[name].loss == pytest.approx(rows["dense"].loss, abs=1e-4 if name == "pp_fp32" else 0.01)
    # Exact sums and means give the same model; the one without sums is another.
    assert rows["dense"].loss == pytest.approx(rows["ddp_fp32"].loss, abs=1e-4)
    assert rows["fsdp2_fp32"].loss == pytest.approx(rows["ddp_fp32"].loss, abs=1e-4)
    assert abs(rows["none"].loss - rows["ddp_fp32"].loss) > 1e-4  # type: ignore[operator]


@pytest.mark.slow
def test_early_and_late_sums_of_a_hybrid_plan_are_the_same_training(tmp_path: Path) -> None:
    make_corpus(tmp_path / CORPUS_FOLDER)
    settings = replace(SMALL, spec=SMALL.spec.model_copy(update={"layers": 4}))
    with local_site(4) as place:
        early, late = measure_site(ForkedRunner(), place, ["hybrid_int8", "hybrid_int8_late"], settings, tmp_path)
    # A bucket has gradients of one stage or of several, so blocks of integers begin elsewhere.
    assert early.loss == pytest.approx(late.loss, abs=1e-3)
    assert early.counted_bytes_per_parameter == pytest.approx(late.counted_bytes_per_parameter, rel=0.02)
    assert late.late_ratio is None
    assert early.late_ratio is not None
    assert early.late_ratio_low <= early.late_ratio <= early.late_ratio_high  # type: ignore[operator]


class Ended:
    """A process that ends with a code, or does not end by itself."""

    pid = 1

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    terminate = kill

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.code


class OneFails(SystemRunner):
    """Starts nothing: rank 1 has failed, the others wait for it."""

    def __init__(self) -> None:
        self.started: list[Ended] = []

    def start(self, argv: Sequence[str], *_: object, log: Path | None = None, **__: object) -> Ended:  # type: ignore[override]
        assert log is not None
        log.write_text("a line\nRuntimeError: Connection refused\n")
        self.started.append(Ended(1 if argv[-1] == "1" else None))
        return self.started[-1]


def test_a_process_that_fails_is_told_with_its_last_words_and_ends_the_others(tmp_path: Path) -> None:
    runner = OneFails()
    with pytest.raises(CommandError, match=r"ended with 1: a line RuntimeError: Connection refused"):
        run_scene(runner, LaunchSpec(3, "lo", ("none",), SMALL), tmp_path, [()] * 3)
    assert [process.code for process in runner.started] == [-9, 1, -9]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--method", "topk"], "there are: none, ddp_fp32"),
        (["--convergence", "--rate", "fast"], "allowed: a number with kbit, mbit or gbit"),
        (["--preset", "huge"], "there are: tiny-1m"),
        (["--hybrid", "--nodes", "3"], "--nodes: found 3 with --hybrid; give even numbers"),
        (["--seeds", "3"], "--seeds: not without --lab, --convergence or --pieces"),
        (["--rate", "1gbit"], "--rate: not without --lab"),
        (["--convergence", "--together", "2"], "--together: not with --convergence"),
        (["--convergence", "--nodes", "4"], "--nodes: not with --convergence"),
        (["--convergence", "--lr", "1e-3,fast"], "--lr: found 'fast'; allowed: numbers between 0 and 1"),
        (["--text", "code"], "--text: not without --lab, --convergence or --pieces"),
        (["--convergence", "--preset", "huge"], "0.13m, 0.68m"),
        (["--pieces", "--convergence"], "--convergence: not with --pieces"),
        (["--convergence", "--method", "int4_in_nodes"], "there are: none, ddp_fp32"),
        (["--lab", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_mistake_is_answered_before_anything_starts(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = [] if "--pieces" in argv else ["-o", "figures"]
    done = CliRunner().invoke(command, ["compression", *argv, *output], standalone_mode=False)
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []
