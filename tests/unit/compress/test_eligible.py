"""Which gradients may be compressed."""

from __future__ import annotations

import pytest

from hpctrain.compress.build import is_compressible
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.compression import Layers


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
