"""Every family computes what its formulas say, whatever stages it is cut into, and has as many weights as counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.model.build import build_modules, build_part, build_stage
from hpctrain.model.imported.model import blocks_of
from hpctrain.model.layers import StageBlocks, relative_position_bias, relative_position_buckets
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS, EncoderSpec, FamilySpec, Gpt2Spec

GPT2 = Gpt2Spec(layers=3, dim=24, heads=3, vocab=50, positions=16)
ENCODER = EncoderSpec(layers=3, dim=24, heads=3, vocab=50, positions=16)
T5 = EncoderDecoderSpec(
    layers=5, encoder_layers=2, dim=24, heads=3, head_dim=4, vocab=50, buckets=8, max_distance=10, decoder_seq=7
)
GATED = T5.model_copy(update={"gated": True, "tied": False})
OPT = GPT2.model_copy(update={"activation": "relu", "position_offset": 2})
NEOX = GPT2.model_copy(
    update={"activation": "gelu", "parallel_residual": True, "rotary_dim": 4, "rope_base": 50.0, "tied": False}
)
ROBERTA = EncoderSpec(
    layers=3, dim=24, heads=3, vocab=50, positions=16, position_offset=8, padding_id=7, segments=1, norm_eps=1e-5
)
DECODER = DecoderSpec(layers=3, dim=24, heads=3, vocab=50, tied=True)
LIKE_GEMMA = DECODER.model_copy(
    update={
        "head_dim": 12, "kv_heads": 1, "norms": "both", "norm_offset": True, "qk_norm": "head",
        "embedding_scaled": True, "activation": "gelu_tanh", "score_width": 20, "score_cap": 5.0, "logit_cap": 3.0,
        "window": 5, "full_blocks": (1,), "window_rope_base": 100.0,
    }
)  # fmt: skip
LIKE_OLMO = DECODER.model_copy(update={"norms": "after", "qk_norm": "width", "attention_bias": "all", "tied": False})
LIKE_QWEN = DECODER.model_copy(update={"attention_bias": "qkv", "window": 7, "rotary_dim": 4})
DECODERS: dict[str, FamilySpec] = {
    "decoder": DECODER, "like Gemma": LIKE_GEMMA, "like OLMo": LIKE_OLMO, "like Qwen": LIKE_QWEN,
}  # fmt: skip
FAMILIES: dict[str, FamilySpec] = {
    **DECODERS,
    "gpt2": GPT2,
    "encoder": ENCODER,
    "t5": T5,
    "t5 gated": GATED,
    "roberta": ROBERTA,
    "opt": OPT,
    "gpt-neox": NEOX,
}
TOKENS = torch.arange(2 * 12).view(2, 12) * 7 % 50
DECODER_TOKENS = torch.arange(2 * 7).view(2, 7) * 11 % 50

each_family = pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
Weights = dict[str, Tensor]


def weights_of(spec: FamilySpec) -> tuple[torch.nn.Module, Weights]:
    """A model with weights that are large enough for every part to matter, and these by name."""
    model = build_stage(spec, 0, spec.layers, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model, {name: parameter.detach() for name, parameter in model.named_parameters()}


def inputs_of(spec: FamilySpec) -> tuple[Tensor, ...]:
    return (TOKENS, DECODER_TOKENS) if isinstance(spec, EncoderDecoderSpec) else (TOKENS,)


def plain_attention(w: Weights, at: str, x: Tensor, memory: Tensor, heads: int, scale: float, added: Tensor) -> Tensor:
    """Softmax of scores written out, one head at a time. added: [heads or 1, target, source]."""

    def project(name: str, y: Tensor) -> Tensor:
        return y @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", torch.zeros(()))

    q, k, v = (project(name, y).chunk(heads, -1) for name, y in (("wq", x), ("wk", memory), ("wv", memory)))
    outs = []
    for head in range(heads):
        scores = q[head] @ k[head].transpose(1, 2) * scale + added[min(head, len(added) - 1)]
        outs.append(torch.softmax(scores, -1) @ v[head])
    return project("wo", torch.cat(outs, -1))


def layer_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{at}.weight"] + w[f"{at}.bias"]


def rms_norm(w: Weights, at: str, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{at}.weight"]


def exact_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def no_later(seq: int) -> Tensor:
    return torch.full((1, seq, seq), -math.inf).triu(1)


def biased_layer(w: Weights, at: str, x: Tensor, gelu: Callable[[Tensor], Tensor]) -> Tensor:
    inner = gelu(x @ w[f"{at}.w1.weight"].T + w[f"{at}.w1.bias"])
    return inner @ w[f"{at}.w2.weight"].T + w[f"{at}.w2.bias"]


def plain_gpt2(w: Weights, tokens: Tensor) -> Tensor:
    x = w["embedding.weight"][tokens] + w["positions.weight"][: tokens.shape[1]]
    for index in range(GPT2.layers):
        at = f"layers.{index}"
        y = layer_norm(w, f"{at}.attention_norm", x, 1e-5)
        x = x + plain_attention(w, f"{at}.attention", y, y, 3, 8**-0.5, no_later(tokens.shape[1]))
        x = x + biased_layer(w, f"{at}.feed_forward", layer_norm(w, f"{at}.feed_forward_norm", x, 1e-5), tanh_gelu)
    return layer_norm(w, "norm", x, 1e-5) @ w["embedding.weight"].T


def plain_encoder(w: Weights, tokens: Tensor) -> Tensor:
    x = w["embedding.weight"][tokens] + w["positions.weight"][: tokens.shape[1]] + w["segments.weight"][0]
    x = layer_norm(w, "embedding_norm", x, 1e-12)
    for index in range(ENCODER.layers):
        at = f"layers.{index}"
        attended = plain_attention(w, f"{at}.attention", x, x, 3, 8**-0.5, torch.zeros(1, 1, 1))
        x = layer_norm(w, f"{at}.attention_norm", x + attended, 1e-12)
        x = layer_norm(w, f"{at}.feed_forward_norm", x + biased_layer(w, f"{at}.feed_forward", x, exact_gelu), 1e-12)
    x = exact_gelu(x @ w["transform.weight"].T + w["transform.bias"])
    return layer_norm(w, "transform_norm", x, 1e-12) @ w["embedding.weight"].T + w["head.bias"]


def plain_row(distance: int, causal: bool) -> int:
    """The row of the table for one distance, of 8 rows, up to a distance of 10."""
    rows, first = 8, 0
    if causal:
        away = max(-distance, 0)
    else:
        rows, away, first = 4, abs(distance), 4 * (distance > 0)
    near = rows // 2
    if away < near:
        return first + away
    return first + min(rows - 1, near + int(math.log(away / near) / math.log(10 / near) * (rows - near)))


def plain_added(table: Tensor, seq: int, causal: bool) -> Tensor:
    rows = torch.tensor([[plain_row(j - i, causal) for j in range(seq)] for i in range(seq)])
    added = table[rows].permute(2, 0, 1)
    return added + no_later(seq) if causal else added


def plain_t5(w: Weights, tokens: Tensor, decoder_tokens: Tensor, gated: bool) -> Tensor:
    def feed_forward(at: str, y: Tensor) -> Tensor:
        first = y @ w[f"{at}.w1.weight"].T
        inner = tanh_gelu(first) * (y @ w[f"{at}.w3.weight"].T) if gated else first.clamp(min=0)
        return inner @ w[f"{at}.w2.weight"].T

    memory, x = w["embedding.weight"][tokens], w["embedding.weight"][decoder_tokens]
    for index in range(2):
        at = f"layers.{index}"
        y = rms_norm(w, f"{at}.attention_norm", memory)
        added = plain_added(w["relative_encoder.weight"], tokens.shape[1], causal=False)
        memory = memory + plain_attention(w, f"{at}.attention", y, y, 3, 1.0, added)
        memory = memory + feed_forward(f"{at}.feed_forward", rms_norm(w, f"{at}.feed_forward_norm", memory))
    memory = rms_norm(w, "encoder_norm", memory)
    for index in range(2, 5):
        at = f"layers.{index}"
        y = rms_norm(w, f"{at}.attention_norm", x)
        added = plain_added(w["relative_decoder.weight"], decoder_tokens.shape[1], causal=True)
        x = x + plain_attention(w, f"{at}.attention", y, y, 3, 1.0, added)
        y = rms_norm(w, f"{at}.cross_attention_norm", x)
        x = x + plain_attention(w, f"{at}.cross_attention", y, memory, 3, 1.0, torch.zeros(1, 1, 1))
        x = x + feed_forward(f"{at}.feed_forward", rms_norm(w, f"{at}.feed_forward_norm", x))
    x = rms_norm(w, "norm", x)
    return x @ w["head.weight"].T if gated else x * 24**-0.5 @ w["embedding.weight"].T


@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        (GPT2, plain_gpt2),
        (ENCODER, plain_encoder),
        (T5, lambda w, *tokens: plain_t5(w, *tokens, gated=False)),
        (GATED, lambda w, *tokens: plain_t5(w, *tokens, gated=True)),
    ],
    ids=["gpt2", "encoder", "t5", "t5 gated"],
)
def test_logits_are_those_of_the_formulas(spec: FamilySpec, plain: Callable[..., Tensor]) -> None:
    model, weights = weights_of(spec)
    torch.testing.assert_close(model(*inputs_of(spec)), plain(weights, *inputs_of(spec)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions_share_rows_by_distance(causal: bool) -> None:
    distances = torch.arange(-40, 41)
    expected = [plain_row(distance, causal) for distance in distances.tolist()]
    assert relative_position_buckets(distances, 8, 10, causal).tolist() == expected
    table = torch.nn.Embedding(8, 3)
    added = relative_position_bias(table, torch.empty(1, 11, 2), 10, causal)[0]
    torch.testing.assert_close(added, plain_added(table.weight, 11, causal), rtol=0, atol=0)


def test_powers_of_two_fall_into_the_rows_of_published_models() -> None:
    distances = torch.tensor([-8, -15, -16, -31, -32, -63, -64, -127, -128, 16, 64])
    assert relative_position_buckets(distances, 32, 128, causal=False).tolist() == [
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        15,
        26,
        30,
    ]


@each_family
def test_a_model_in_parts_is_the_model(spec: FamilySpec) -> None:
    whole = build_stage(spec, 0, spec.layers, seed=5)
    weights = dict(whole.named_parameters())
    expected = whole(*inputs_of(spec))
    last = spec.layers
    for cuts in ([0, 0, last], [0, last, last], [0, 2, last], [0, 1, 2, 2, 3, last], [0, 3, last]):
        x, *decoder_tokens = inputs_of(spec)
        held: dict[str, int] = {}
        for stage, (start, stop) in enumerate(itertools.pairwise(cuts)):
            ends = {"first": stage == 0, "last": stage == len(cuts) - 2}
            part = build_part(spec, StageBlocks(start, stop, **ends), seed=5)
            x = part(x, *decoder_tokens)
            if not ends["last"]:
                assert x.shape[1] == spec.boundary_length(12, stop)
                assert x.numel() * 4 == spec.stage_boundary_bytes(2, 12, cut=stop) <= spec.stage_boundary_bytes(2, 12)
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, weights[name]), name
                held[name] = held.get(name, 0) + 1
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
        assert held.keys() == weights.keys()
        shared = spec.shared_weights(list(itertools.pairwise(cuts)))
        assert {name: count for name, count in held.items() if count > 1} == {
            name: len(stages) for name, stages in shared.items()
        }


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_weights_as_counted(name: str) -> None:
    spec = PRESETS[name].model_copy(update={"vocab": 1001})
    middle = spec.preferred_cut or spec.layers // 2
    for start, stop in ((0, 1), (middle - 1, middle + 1), (spec.layers - 1, spec.layers)):
        with torch.device("meta"):
            part = build_modules(spec, StageBlocks(start, stop, start == 0, stop == spec.layers))
        assert sum(parameter.numel() for parameter in part.parameters()) == spec.parameters(start, stop)


@each_family
def test_the_parts_of_a_model_have_all_its_weights(spec: FamilySpec) -> None:
    for start, stop in ((0, spec.layers), (0, 0), (0, 2), (1, 3), (2, spec.layers), (spec.layers, spec.layers)):
        count = sum(parameter.numel() for parameter in build_stage(spec, start, stop, seed=0).parameters())
        assert count == spec.parameters(start, stop)
        ends = {"first": start == 0, "last": stop == spec.layers}
        assert count <= spec.stage_parameters(stop - start, **ends)
        if any(ends.values()):
            assert count == spec.stage_parameters(stop - start, **ends)


@each_family
def test_blocks_keep_for_their_backward_pass_what_was_counted(spec: FamilySpec) -> None:
    model = build_stage(spec, 0, spec.layers, seed=0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    stream, target = torch.randn(4, 12, spec.dim), torch.randn(4, 7, spec.dim)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        held = []  # as long as it lives, its memory is not used again
        for index, block in blocks_of(model).items():
            x = (target if index >= 2 and isinstance(spec, EncoderDecoderSpec) else stream).clone().requires_grad_()
            added = [torch.zeros(1, 3, x.shape[1], x.shape[1])] if isinstance(spec, EncoderDecoderSpec) else []
            memory = [stream.clone()] if x.shape[1] == 7 else []
            held.append(block(x, *added, *memory))
    # The memory that the decoder's blocks look at is one for all of them, and counted nowhere.
    memories = 3 * stream.numel() * 4 if isinstance(spec, EncoderDecoderSpec) else 0
    assert sum(kept.values()) - memories == pytest.approx(spec.layers * spec.activation_bytes(4, 12), rel=0.04)


@each_family
def test_a_new_model_knows_nothing_and_is_not_sure_of_it(spec: FamilySpec) -> None:
    wide = spec.model_copy(update={"dim": 96, "vocab": 400})
    logits = build_stage(wide, 0, wide.layers, seed=1)(*inputs_of(wide))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.arange(logits[..., 0].numel()))
    assert float(loss.detach()) == pytest.approx(math.log(400), rel=0.15)
    biases = [p for name, p in build_stage(wide, 0, 1, seed=1).named_parameters() if name.endswith(".bias")]
    assert all(not bias.any() for bias in biases)
