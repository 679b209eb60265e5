"""Named models. The number in a name is the model's usual size in parameters; the exact count depends on the
vocabulary."""

from __future__ import annotations

from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import DecoderSpec, EncoderSpec, FamilySpec, Gpt2Spec


def _t5(layers: int, dim: int, heads: int, head_dim: int, ffn_dim: int) -> EncoderDecoderSpec:
    """Return a T5 v1.0 (Raffel et al. 2020) with `layers` each in encoder and decoder."""
    return EncoderDecoderSpec(layers=2 * layers, dim=dim, heads=heads, head_dim=head_dim, ffn_dim=ffn_dim)


def _t5_v1_1(layers: int, dim: int, heads: int, ffn_dim: int) -> EncoderDecoderSpec:
    """Return a T5 v1.1: gated GELU, attention heads of width 64, an untied head."""
    return EncoderDecoderSpec(
        layers=2 * layers, dim=dim, heads=heads, head_dim=64, ffn_dim=ffn_dim, gated=True, tied=False
    )


PRESETS: dict[str, FamilySpec] = {
    "tiny-1m": DecoderSpec(layers=6, dim=128, heads=4),
    "mini-10m": DecoderSpec(layers=8, dim=320, heads=5),
    "small-125m": DecoderSpec(layers=12, dim=768, heads=12),
    "medium-350m": DecoderSpec(layers=24, dim=1024, heads=16),
    "large-1.3b": DecoderSpec(layers=24, dim=2048, heads=16),
    "xl-7b": DecoderSpec(layers=32, dim=4096, heads=32, ffn_dim=11008),
    "xxl-70b": DecoderSpec(layers=80, dim=8192, heads=64, kv_heads=8, ffn_dim=28672),
    "llama-1b": DecoderSpec(layers=16, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, tied=True, rope_base=500_000),
    "llama-3b": DecoderSpec(layers=28, dim=3072, heads=24, kv_heads=8, ffn_dim=8192, tied=True, rope_base=500_000),
    "llama-8b": DecoderSpec(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, rope_base=500_000),
    "llama-13b": DecoderSpec(layers=40, dim=5120, heads=40, ffn_dim=13824),
    "gpt2-30m": Gpt2Spec(layers=6, dim=384, heads=6),
    "gpt2-124m": Gpt2Spec(layers=12, dim=768, heads=12),
    "gpt2-355m": Gpt2Spec(layers=24, dim=1024, heads=16),
    "gpt2-774m": Gpt2Spec(layers=36, dim=1280, heads=20),
    "gpt2-1.5b": Gpt2Spec(layers=48, dim=1600, heads=25),
    "gpt3-6.7b": Gpt2Spec(layers=32, dim=4096, heads=32, positions=2048),
    "gpt3-13b": Gpt2Spec(layers=40, dim=5120, heads=40, positions=2048),
    "bert-4m": EncoderSpec(layers=2, dim=128, heads=2),
    "bert-11m": EncoderSpec(layers=4, dim=256, heads=4),
    "bert-41m": EncoderSpec(layers=8, dim=512, heads=8),
    "bert-110m": EncoderSpec(layers=12, dim=768, heads=12),
    "bert-340m": EncoderSpec(layers=24, dim=1024, heads=16),
    "paper-12x768": EncoderSpec(layers=12, dim=768, heads=12),
    "encoder-1.3b": EncoderSpec(layers=24, dim=2048, heads=16),
    "t5-16m": _t5(4, 256, 4, 64, 1024),
    "t5-60m": _t5(6, 512, 8, 64, 2048),
    "t5-220m": _t5(12, 768, 12, 64, 3072),
    "t5-770m": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    "t5-v1.1-77m": _t5_v1_1(8, 512, 6, 1024),
    "t5-v1.1-250m": _t5_v1_1(12, 768, 12, 2048),
    "t5-v1.1-780m": _t5_v1_1(24, 1024, 16, 2816),
    "t5-v1.1-3b": _t5_v1_1(24, 2048, 32, 5120),
    "t5-v1.1-11b": _t5_v1_1(24, 4096, 64, 10240),
}
"""Models by name: like Llama (Touvron et al. 2023 and later releases), GPT-2 (Radford et al. 2019; the two largest have
the shapes of Brown et al. 2020), BERT (Devlin et al. 2019, Turc et al. 2019), T5 (Raffel et al. 2020).

`paper-12x768` and `encoder-1.3b` are both the model of the paper that this project implements. Its section 4.1 states
12 layers of width 768, which with a vocabulary of 32,000 are 0.11 billion parameters, and calls that 1.3 billion. The
first has the stated shape, the second the stated size at a common shape; the paper does not say which of the two was
trained.
"""
