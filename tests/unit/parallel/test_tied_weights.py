"""A tied matrix is one parameter in one stage and a copy at each end of a cut model; the planner's counts know both."""

from __future__ import annotations

import pytest
import torch

from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec

SPEC = DecoderSpec(layers=3, dim=32, heads=4, kv_heads=2, vocab=50, tied=True)
UNTIED = SPEC.model_copy(update={"tied": False})


@pytest.mark.parametrize("spec", [SPEC, UNTIED])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (0, 2), (2, 3), (0, 0), (3, 3), (1, 2)])
def test_the_count_is_that_of_the_model(spec: DecoderSpec, start: int, stop: int) -> None:
    module = build_stage(spec, start, stop, seed=0)
    assert sum(parameter.numel() for parameter in module.parameters()) == spec.parameters(start, stop)


def test_both_ends_hold_the_same_matrix_under_one_name() -> None:
    whole, first, last = (dict(build_stage(SPEC, *cut, seed=0).named_parameters()) for cut in ((0, 3), (0, 2), (2, 3)))
    assert set(first) | set(last) == set(whole)
    assert set(first) & set(last) == {"embedding.weight"}
    assert all(torch.equal(part[name], whole[name]) for part in (first, last) for name in part)
    assert sum(SPEC.parameters(*cut) for cut in ((0, 2), (2, 3))) == SPEC.parameters() + SPEC.embedding_parameters()


def test_the_head_is_the_embedding() -> None:
    module = build_stage(SPEC, 0, SPEC.layers, seed=0)
    assert module.head.weight is module.embedding.weight
    logits = module(torch.arange(6).view(1, 6))
    assert logits.shape == (1, 6, SPEC.vocabulary)
