"""A decoder-only Transformer in the form of GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases."""

from __future__ import annotations

from functools import partial

from hpctrain.model.biased_layers import BiasedAttention, GeluLayer, Positions
from hpctrain.model.blocks import PreNormBlock
from hpctrain.model.norm import LayerNorm
from hpctrain.model.transformer_part import DecoderPart, StageBlocks
from hpctrain.records.model.gpt2_spec import Gpt2Spec


class Gpt2(DecoderPart):
    """Blocks [start, stop) of GPT-2; the first stage also has embedding and positions, the last one norm and head."""

    def __init__(self, spec: Gpt2Spec, blocks: StageBlocks) -> None:
        norm = partial(LayerNorm, spec.dim, spec.norm_eps)
        super().__init__(
            spec,
            blocks,
            lambda: PreNormBlock(norm, BiasedAttention(spec, causal=True), GeluLayer(spec, "tanh")),
            norm,
            Positions(spec.positions, spec.dim) if blocks.first else None,
        )
