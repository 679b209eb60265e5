"""Names and shapes of the parameters of hpctrain's models (`hpctrain/model`), known without torch. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.families import Gpt2Spec

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of parameters, in the model's order."""


def parameter_shapes(spec: DecoderSpec | Gpt2Spec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all parameters of a decoder or a GPT-2, in the model's order. A tied head is no parameter
    of its own."""
    return dict(_of_decoder(spec) if isinstance(spec, DecoderSpec) else _of_gpt2(spec))


def _of_decoder(spec: DecoderSpec) -> Shapes:
    dim, hidden, query, key_value = spec.dim, spec.hidden, spec.query_width, spec.key_value_width
    yield "embedding.weight", (spec.vocabulary, dim)
    for layer in range(spec.layers):
        at, attention, feed = f"layers.{layer}", f"layers.{layer}.attention", f"layers.{layer}.feed_forward"
        if spec.norms != "after":
            yield f"{at}.attention_norm.weight", (dim,)
        for part, width in (("wq", query), ("wk", key_value), ("wv", key_value)):
            yield from _module(f"{attention}.{part}", width, dim, bias=spec.attention_bias != "none")
        yield from _module(f"{attention}.wo", dim, query, bias=spec.attention_bias == "all")
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "width"
            yield f"{attention}.q_norm.weight", (query if whole else spec.head_width,)
            yield f"{attention}.k_norm.weight", (key_value if whole else spec.head_width,)
        if spec.norms != "before":
            yield f"{at}.attention_output_norm.weight", (dim,)
        if spec.norms != "after":
            yield f"{at}.feed_forward_norm.weight", (dim,)
        yield from _module(f"{feed}.w1", hidden, dim, bias=False)
        yield from _module(f"{feed}.w3", hidden, dim, bias=False)
        yield from _module(f"{feed}.w2", dim, hidden, bias=False)
        if spec.norms != "before":
            yield f"{at}.feed_forward_output_norm.weight", (dim,)
    yield "norm.weight", (dim,)
    if not spec.tied:
        yield "head.weight", (spec.vocabulary, dim)


def _of_gpt2(spec: Gpt2Spec) -> Shapes:
    dim, hidden = spec.dim, spec.hidden
    yield "embedding.weight", (spec.vocabulary, dim)
    if spec.rotary_dim is None:
        yield "positions.weight", (spec.position_rows, dim)
    for layer in range(spec.layers):
        at, attention, feed = f"layers.{layer}", f"layers.{layer}.attention", f"layers.{layer}.feed_forward"
        yield from _module(f"{at}.attention_norm", dim)
        for part in ("wq", "wk", "wv", "wo"):
            yield from _module(f"{attention}.{part}", dim, dim)
        yield from _module(f"{at}.feed_forward_norm", dim)
        yield from _module(f"{feed}.w1", hidden, dim)
        yield from _module(f"{feed}.w2", dim, hidden)
    yield from _module("norm", dim)
    if not spec.tied:
        yield "head.weight", (spec.vocabulary, dim)


def _module(name: str, *shape: int, bias: bool = True) -> Shapes:
    """Yield the weight of this shape, and the bias if there is one, of a norm or a linear layer."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
