"""Which gradients may be compressed."""

from __future__ import annotations

import pytest

from hpctrain.compress.build import is_compressible
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.plan.gradient_codec import Layers
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, layer_group


@pytest.mark.parametrize(
    ("shape", "compressed"),
    [((64, 64), True), ((63, 64), False), ((8192,), False), ((16, 16, 16), True)],
)
def test_matrices_of_some_size(shape: tuple[int, ...], compressed: bool) -> None:
    assert is_compressible(shape, "layers.0.mlp.up.weight", "all") == compressed


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ("all", {"embedding", "attention", "feed_forward", "head"}),
        ("non_attention", {"embedding", "feed_forward", "head"}),
        ("non_attention_linear", {"embedding", "attention", "feed_forward", "head"}),
        ("embedding_head", {"embedding", "head"}),
        ("attention", {"attention"}),
        ("feed_forward", {"feed_forward"}),
        (["*.feed_forward.*", "head.*"], {"feed_forward", "head"}),
        (["layers.1.*"], {"attention", "feed_forward"}),
    ],
)
def test_layers_of_the_models_built_here(layers: Layers, kinds: set[str]) -> None:
    spec = DecoderSpec(layers=2, dim=128, heads=4, vocab=64)
    names = {
        name for name, p in build_stage(spec, 0, 2, 0).named_parameters() if is_compressible(p.shape, name, layers)
    }
    found = {kind for name in names for kind in ("embedding", "attention", "feed_forward", "head") if kind in name}
    assert found == kinds, names


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.1.attention.wq.weight", "inputs"),
        ("layers.1.attention.wo.weight", "output"),
        ("layers.9.cross_attention.wk.weight", "inputs"),
        ("layers.9.cross_attention.wo.weight", "output"),
        ("decoder.block.0.layer.1.EncDecAttention.v.weight", "inputs"),
        ("decoder.block.0.layer.1.EncDecAttention.o.weight", "output"),
        ("model.layers.0.self_attn.q_proj.weight", "inputs"),
        ("model.layers.0.self_attn.o_proj.weight", "output"),
        ("transformer.h.0.attn.c_attn.weight", "inputs"),
        ("transformer.h.0.attn.c_proj.weight", "output"),
        ("transformer.h.0.mlp.c_proj.weight", "other"),
        ("encoder.layers.0.encoder_attn.out_proj.weight", "output"),
        ("embedding.weight", "other"),
    ],
)
def test_all_attention_is_left_out_but_the_published_choice_has_its_outputs(name: str, part: str) -> None:
    assert is_compressible((64, 64), name, "non_attention") == (part == "other")
    assert [group for group in LAYER_GROUPS if is_compressible((64, 64), name, group)] == [layer_group(name)]
    assert is_compressible((64, 64), name, "non_attention_linear") == (part != "inputs")


def test_the_families_name_their_attentions_so() -> None:
    spec = EncoderDecoderSpec(family="encoder_decoder", layers=2, dim=128, heads=4, vocab=64)
    parameters = list(build_stage(spec, 0, spec.layers, 0).named_parameters())
    sizes = {
        layers: sum(p.numel() for name, p in parameters if is_compressible(p.shape, name, layers))
        for layers in ("all", "non_attention", "non_attention_linear")
    }
    # Two encoder blocks with one attention each, two decoder blocks with two: four matrices each.
    attentions = sum(".attention." in name or ".cross_attention." in name for name, _ in parameters) // 4
    assert sizes["all"] - sizes["non_attention"] == attentions * 4 * 128 * 128
    assert sizes["non_attention_linear"] - sizes["non_attention"] == attentions * 128 * 128
