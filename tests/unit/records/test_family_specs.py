"""The families in a run file, and what is known of a model without building it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS, EncoderSpec, Gpt2Spec
from hpctrain.records.run.run import Run, read_run

TEXT = """\
steps: 1
model: {dims: {DIMS}}
data: {train: [d], seq_len: 64}
batch: {global: 1}
"""


def read(folder: Path, dims: str) -> Run:
    (folder / "run.yaml").write_text(TEXT.replace("DIMS", dims))
    return read_run(folder / "run.yaml")


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("layers: 2, dim: 8, heads: 2", DecoderSpec(layers=2, dim=8, heads=2)),
        ("family: gpt2, layers: 2, dim: 8, heads: 2", Gpt2Spec(layers=2, dim=8, heads=2)),
        ("family: encoder, layers: 2, dim: 8, heads: 2", EncoderSpec(layers=2, dim=8, heads=2)),
        ("family: encoder_decoder, layers: 2, dim: 8, heads: 2", EncoderDecoderSpec(layers=2, dim=8, heads=2)),
    ],
)
def test_the_family_decides_which_keys_there_are(tmp_path: Path, dims: str, expected: DecoderSpec) -> None:
    run = read(tmp_path, dims)
    assert run.spec() == expected
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("family: bert, layers: 2, dim: 8, heads: 2", r":2: model\.dims\.family: found 'bert'; allowed: 'decoder'"),
        (
            "family: gpt2, layers: 2, dim: 8, heads: 2, gated: true",
            r":2: model\.dims\.gated: not a key of this family; allowed: layers",
        ),
        ("family: gpt2, layers: 2, dim: 8, heads: 3", r"dim 8 is not a multiple of heads 3"),
        ("family: gpt2, layers: 2, dim: 8, heads: 2, positions: 32", "data.seq_len is 64, and the model has 32 positi"),
        ("family: encoder_decoder, layers: 4, encoder_layers: 4, dim: 8, heads: 2", "leaves no decoder block"),
        ("family: encoder_decoder, layers: 4, dim: 8, heads: 2, max_distance: 16", "not more than half of buckets 32"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_file(tmp_path: Path, dims: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read(tmp_path, dims)


@pytest.mark.parametrize(
    ("preset", "vocabulary", "count"),
    [
        # Counts that were published with these models.
        ("gpt2-124m", 50257, 124_439_808),
        ("gpt2-1.5b", 50257, 1_557_611_200),
        ("t5-60m", 32128, 60_506_624),
        ("t5-11b", 32128, 11_307_321_344),
        ("t5-v1.1-77m", 32128, 76_961_152),
        ("llama-8b", 128256, 8_030_261_248),
        ("bert-110m", 30522, 109_514_298),
        ("paper-12x768", 32000, 110_650_880),
        ("encoder-1.3b", 32000, 1_279_423_744),
    ],
)
def test_presets_have_the_size_in_their_names(preset: str, vocabulary: int, count: int) -> None:
    assert PRESETS[preset].model_copy(update={"vocab": vocabulary}).parameters() == count


def test_settings_of_later_models_change_no_hash_of_an_earlier_one() -> None:
    """Checkpoints hold this hash of the time before there were such settings."""
    llama = PRESETS["llama-8b"]
    assert llama.sha256() == "02ffcb2dc7372cf3106feb44688d415cb5a546d6ed739bd48b30d6ae8be605ca"
    assert not llama.to_json().keys() & llama.later_fields
    window = llama.model_copy(update={"window": 4096})
    assert window.sha256() != llama.sha256()
    assert DecoderSpec.model_validate(window.to_json()) == window


def test_a_window_takes_away_the_flops_of_scores_that_it_hides() -> None:
    spec = DecoderSpec(layers=4, dim=64, heads=4, head_dim=32, vocab=100, window=16, full_blocks=(1, 3))
    scores = 4.0 * 2 * 128  # of two blocks, for a visible position; queries are wider than the model
    for start in range(5):
        full, windowed = (sum(block >= start for block in blocks) for blocks in ((1, 3), (0, 2)))
        visible = 64 * (64 + 1) / 2 * full + (16 * 17 / 2 + 48 * 16) * windowed
        found = spec.forward_flops(2, 64, start) - spec.forward_flops(2, 64, 4)
        products = (4 - start) * 2.0 * spec.block_weights * 2 * 64
        # The formula counts half of a position's own score.
        assert found - products == pytest.approx(scores * visible, rel=0.04)
    assert spec.forward_flops(2, 16) == spec.model_copy(update={"window": None}).forward_flops(2, 16)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("layers: 2, dim: 8, heads: 2, full_blocks: [0]", "full_blocks and window_rope_base need a window"),
        ("layers: 2, dim: 8, heads: 2, window: 4, full_blocks: [1, 0]", "full_blocks: allowed: numbers from 0 to 1"),
        ("layers: 2, dim: 8, heads: 2, window: 4, full_blocks: [2]", "full_blocks: allowed: numbers from 0 to 1"),
        ("layers: 2, dim: 8, heads: 2, rotary_dim: 6", "rotary_dim 6 is more than the width of a head, 4"),
        ("layers: 2, dim: 8, heads: 3", "dim 8 is not a multiple of heads 3; give head_dim"),
        ("layers: 2, dim: 8, heads: 3, head_dim: 3", "head_dim is 3; rotary positions need an even"),
        ("layers: 2, dim: 8, heads: 2, rope_scaling: {mode: dynamic}", r"rope_scaling\.mode: found 'dynamic'; allowed"),
        ("layers: 2, dim: 8, heads: 2, norms: none", r"norms: found 'none'; input should be 'before', 'after'"),
    ],
)
def test_settings_that_do_not_fit_are_told(tmp_path: Path, dims: str, message: str) -> None:
    with pytest.raises(FileError, match=message) as refused:
        read(tmp_path, dims)
    assert len(str(refused.value).splitlines()) == 1


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(1, 4))
def test_stages_share_out_flops_and_tensor_parallelism_divides(
    encoders: int, decoders: int, gated: bool, cuts: int
) -> None:
    layers = encoders + decoders
    spec = EncoderDecoderSpec(
        layers=layers, encoder_layers=encoders, dim=16, heads=4, head_dim=8, vocab=60, gated=gated, decoder_seq=5
    )
    edges = sorted({0, layers, *(layers * cut // 4 for cut in range(cuts))})
    remaining = [spec.forward_flops(2, 12, start) for start in edges]
    assert all(before > after for before, after in itertools.pairwise(remaining))
    assert remaining[-1] == 2 * 2 * 5 * 60 * 16, "the head's, for two sequences of five tokens"
    assert spec.parameters(tp=2) < spec.parameters() < 2 * spec.parameters(tp=2)
    assert spec.activation_bytes(2, 12, tp=2) - spec.residual_stream_bytes(2, 12) == pytest.approx(
        (spec.activation_bytes(2, 12) - spec.residual_stream_bytes(2, 12)) / 2, abs=1
    )
    # A model in two stages: in FLOPs and in what is kept, both together are all of it.
    first, last = (
        spec.mean_blocks(count, 12, first=end, last=not end) for count, end in ((1, True), (layers - 1, False))
    )
    assert first[0] + last[0] == pytest.approx(layers)
    assert first[1] + last[1] == pytest.approx(layers)


def test_the_table_of_presets_says_their_sizes() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "models.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    found = {row[0]: row[-1] for row in rows if row[0] in PRESETS and not row[-1].endswith("MB")}
    assert found.keys() == PRESETS.keys()
    for name, said in found.items():
        number, unit = said.split()
        count = PRESETS[name].model_copy(update={"vocab": 32000}).parameters()
        size, half_a_digit = {"M": (1e6, 0.5), "B": (1e9, 0.005)}[unit]
        assert count / size == pytest.approx(float(number), abs=half_a_digit), name
