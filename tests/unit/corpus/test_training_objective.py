"""What a model reads and is asked for: the text is all there, the counts are exact, and company changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.objective import NO_TARGET, Examples, SpecialTokens, examples, special_tokens
from hpctrain.records.model.families import PRESETS
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.run.objective import NEXT_TOKEN, AnyObjective, Masked, SpanCorruption, lengths, resolved_objective

VOCABULARY = 1000
MASKED = Masked(mode="masked")
SPANS = SpanCorruption(mode="span_corruption")


def make(objective: AnyObjective, seq_len: int, samples: range, seed: int = 0) -> tuple[Examples, np.ndarray]:
    """Examples and the windows they are made of; a sample's window depends on its number alone."""
    sizes = lengths(objective, seq_len)
    sentinels = tuple(VOCABULARY + 2 + sizes.spans - number for number in range(sizes.spans))
    special = SpecialTokens(
        VOCABULARY, VOCABULARY + 3 + sizes.spans, end_of_text=VOCABULARY + 2, mask=VOCABULARY, start=VOCABULARY + 1,
        sentinels=sentinels,
    )  # fmt: skip
    rows = np.array([np.random.default_rng(n).integers(0, VOCABULARY, sizes.raw + 1) for n in samples])
    return examples(objective, special, seq_len, seed, np.array(samples), rows), rows


def test_next_tokens_are_the_text_one_further() -> None:
    made, rows = make(NEXT_TOKEN, 16, range(3))
    assert (made.inputs == rows[:, :-1]).all()
    assert (made.targets == rows[:, 1:]).all()
    assert made.decoder_tokens is None


def test_the_targets_of_one_sample_can_be_changed_without_its_inputs() -> None:
    """As an evaluation does, which hides the targets of samples that only fill a batch."""
    made, rows = make(NEXT_TOKEN, 16, range(1))
    before = rows.copy()
    made.targets[:] = NO_TARGET
    assert (made.inputs == before[:, :-1]).all()
    assert (rows == before).all()


@given(st.integers(8, 200), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_masking_hides_exactly_as_many_positions_in_every_sample(
    seq_len: int, fraction: float, mask_fraction: float, seed: int, first: int
) -> None:
    objective = Masked(mode="masked", fraction=fraction, mask_fraction=mask_fraction, random_fraction=0.0)
    made, rows = make(objective, seq_len, range(first, first + 3), seed)
    chosen = made.targets != NO_TARGET
    assert (chosen.sum(1) == max(1, round(fraction * seq_len))).all()
    assert (made.targets[chosen] == rows[:, :-1][chosen]).all()
    assert (made.inputs[~chosen] == rows[:, :-1][~chosen]).all()
    assert np.isin(made.inputs[chosen], VOCABULARY).sum() == (made.inputs == VOCABULARY).sum()


def test_hidden_positions_become_mask_other_and_same_in_the_papers_shares() -> None:
    made, rows = make(MASKED, 512, range(200))
    chosen = made.targets != NO_TARGET
    shown, kept = made.inputs[chosen], rows[:, :-1][chosen]
    n = len(shown)
    masked, same = (shown == VOCABULARY).mean(), (shown == kept).mean()
    assert masked == pytest.approx(0.8, abs=5 * np.sqrt(0.16 / n))
    assert same == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=5 * np.sqrt(0.09 / n))
    by_position = chosen.mean(0)
    assert by_position.min() > 0.15 - 6 * np.sqrt(0.1275 / 200)
    assert by_position.max() < 0.15 + 6 * np.sqrt(0.1275 / 200)
    others = shown[(shown != VOCABULARY) & (shown != kept)]
    assert others.max() < VOCABULARY
    assert len(np.unique(others)) > 0.7 * min(VOCABULARY, len(others))


def restored(inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """The text, with each sentinel in the inputs replaced by what the targets say of it."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1].tolist():
        if token > VOCABULARY + 2:
            spans[token] = here = []
        else:
            here.append(token)
    return [word for token in inputs[:-1].tolist() for word in spans.get(token, [token])]


@given(st.integers(8, 300), st.floats(0.01, 0.45), st.floats(1, 8), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_corrupted_spans_fill_the_input_and_can_be_put_back(
    seq_len: int, fraction: float, mean_span: float, seed: int, first: int
) -> None:
    objective = SpanCorruption(mode="span_corruption", fraction=fraction, mean_span=mean_span)
    try:
        sizes = lengths(objective, seq_len)
    except InputError:
        return  # a few lengths are those of no corrupted text; the next test has the usual ones
    made, rows = make(objective, seq_len, range(first, first + 3), seed)
    assert made.inputs.shape == (3, seq_len)
    assert made.targets.shape == (3, sizes.outputs)
    for inputs, targets, row in zip(made.inputs, made.targets, rows, strict=True):
        assert restored(inputs, targets) == row[:-1].tolist()
        assert inputs[-1] == targets[-1] == VOCABULARY + 2
        order = [token for token in inputs.tolist() if token > VOCABULARY + 2]
        assert order == [token for token in targets.tolist() if token > VOCABULARY + 2]
        assert order == list(range(order[0], order[0] - sizes.spans, -1))
    assert made.decoder_tokens is not None
    assert (made.decoder_tokens[:, 0] == VOCABULARY + 1).all()
    assert (made.decoder_tokens[:, 1:] == made.targets[:, :-1]).all()


def test_spans_have_the_lengths_of_the_paper() -> None:
    """T5's own: 512 tokens of input are made of 568, and 114 are asked for."""
    sizes = lengths(SPANS, 512)
    assert (sizes.raw, sizes.outputs, sizes.spans) == (568, 114, 28)
    assert all(lengths(SPANS, seq_len).inputs == seq_len for seq_len in range(8, 2100))
    with pytest.raises(InputError, match=r"data\.seq_len: found 12; no text"):
        lengths(SpanCorruption(mode="span_corruption", fraction=0.5, mean_span=1), 12)


@pytest.mark.parametrize("objective", [MASKED, SPANS])
def test_a_sample_is_the_same_in_any_company_and_another_with_another_seed(objective: AnyObjective) -> None:
    whole, _ = make(objective, 64, range(40, 52))
    parts = [make(objective, 64, part)[0] for part in (range(40, 43), range(43, 52))]
    for column in (0, 1):
        assert (np.concatenate([part[column] for part in parts]) == whole[column]).all()
    assert (make(objective, 64, range(40, 52), seed=1)[0].inputs != whole.inputs).any()


def test_a_model_learns_what_its_family_can() -> None:
    spec: Spec = next(iter(PRESETS.values()))
    assert resolved_objective(None, spec) == NEXT_TOKEN
    assert resolved_objective(MASKED, spec) is MASKED
    message = r"objective\.mode: found span_corruption; a model of the family decoder learns next_token or masked"
    with pytest.raises(InputError, match=message):
        resolved_objective(SPANS, spec)


def test_bytes_get_their_special_tokens_behind_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "c")
    assert special_tokens([tmp_path / "c"], NEXT_TOKEN, 512) == SpecialTokens(257, 257, 256)
    assert special_tokens([tmp_path / "c"], MASKED, 512) == SpecialTokens(257, 258, 256, mask=257)
    found = special_tokens([tmp_path / "c"], SPANS, 512)
    assert found == SpecialTokens(257, 286, 256, start=257, sentinels=tuple(range(285, 257, -1)))


def test_a_tokenizers_own_special_tokens_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "first", PrepareOptions("train:260"))
    value = json.loads((tmp_path / "first" / "tokenizer.json").read_text())
    size = 260
    for name in ("[MASK]", "<pad>", "<extra_id_1>", "<extra_id_0>"):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        value["added_tokens"].append({"id": size, "content": name, "special": True, **flags})
        size += 1
    (tmp_path / "own.json").write_text(json.dumps(value))
    prepare([tmp_path / "a.txt"], tmp_path / "c", PrepareOptions(str(tmp_path / "own.json")))
    known = {
        token["content"]: token["id"]
        for token in json.loads((tmp_path / "c" / "tokenizer.json").read_text())["added_tokens"]
    }
    masked = special_tokens([tmp_path / "c"], MASKED, 64)
    assert (masked.mask, masked.vocabulary) == (known["[MASK]"], masked.data_vocabulary)
    spans = special_tokens([tmp_path / "c"], SPANS, 64)
    own = (known["<extra_id_0>"], known["<extra_id_1>"])
    assert (spans.start, spans.sentinels) == (known["<pad>"], (*own, spans.data_vocabulary))
    assert spans.vocabulary == spans.data_vocabulary + 1
    (tmp_path / "c" / "tokenizer.json").write_text("{")
    with pytest.raises(FileError, match=r"tokenizer\.json: is no tokenizer\.json .*prepare the folder again"):
        special_tokens([tmp_path / "c"], MASKED, 64)
