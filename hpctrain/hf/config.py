"""Reads the config.json of a Hugging Face folder into a model's spec (`records/model/families.py`), and writes a
config.json from a spec. Pure; tensors are not looked at.

Keys and their defaults follow the configuration classes of transformers 4.45 to 5. A setting that hpctrain's models
lack is refused by name, because otherwise the run would silently train a model that computes something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from hpctrain.base.errors import FieldError, FileError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.records.format.validation_errors import dotted
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import SEGMENTS, DecoderSpec, EncoderSpec, FamilySpec, Gpt2Spec

CONFIG_NAME = "config.json"

_BY_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}
"""`model_type` -> architecture, for a config.json without the key `architectures`."""

_DROPOUT = (
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "dropout_rate",
)  # fmt: skip
_SIZES = {
    "dim": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers", "ffn_dim": "intermediate_size",
    "vocab": "vocab_size",
}  # fmt: skip
"""Field of a spec -> key of config.json, for the sizes of Llama and BERT."""

SIZE_MAX = 2**31
"""Largest value of any size in a config.json; the spec checks each size further."""

FamilySpecT = TypeVar("FamilySpecT", DecoderSpec, Gpt2Spec, EncoderSpec, EncoderDecoderSpec)


class _Keys:
    """Reads the keys of one config.json. A method that finds an error records it and returns a value of the right type,
    so that one FileError can list all errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        self._mistakes: list[FieldError] = []

    def size(self, key: str, default: int | None = None) -> int:
        """Return the whole number above 0 at `key` of the config.json. If the key is absent, return `default`; without
        a default, record an error."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= SIZE_MAX:
            return value
        self.refuse(key, f"a whole number above 0, up to {SIZE_MAX}")
        return 1

    def sizes(self, **keys: str) -> dict[str, int]:
        """Return field -> whole number above 0 at the field's key. A missing or wrong value is recorded as an error,
        and the field gets 1.

        Args:
            keys: field of a spec -> key of config.json.
        """
        return {field: self.size(key) for field, key in keys.items()}

    def number(self, key: str, default: float, inner: str | None = None) -> float:
        """Return the number above 0 at `key` of the config.json or, if `inner` is given, at the key `inner` of the
        mapping there. Without `inner`, an absent `key` gives `default`. A wrong value is recorded as an
        error, and gives `default`."""
        value = self._values.get(key, default) if inner is None else self._values[key][inner]
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.refuse(key, "a number above 0" if inner is None else f"{inner} as a number above 0")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key` of the config.json; `default` if the key is absent or null. For any other value,
        record an error and return `default`."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        self.refuse(key, "true or false")
        return default

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Return the value at `key` of the config.json, and record an error unless it is one of `allowed`.

        Args:
            default: the value that transformers assumes if the key is absent.
        """
        value = self._values.get(key, default)
        if value not in allowed:
            self.refuse(key, " or ".join(_short_repr(choice) for choice in allowed))
        return value

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def refuse(self, key: str, allowed: str) -> None:
        """Record the error that the value at `key` is not supported; `allowed` says in words which values are."""
        shown = f"found {_short_repr(self._values[key])}" if key in self._values else "not there"
        self._mistakes.append(FieldError(key, f"{shown}; allowed: {allowed}"))

    def build_spec(self, kind: type[FamilySpecT], **fields: Any) -> FamilySpecT:
        """Return the spec of class `kind` with the given fields.

        Raises:
            FileError: an error was recorded, or the spec refuses a field; all errors are listed.
        """
        if not self._mistakes:
            try:
                return kind(**fields)
            except ValidationError as error:
                self._mistakes += [
                    FieldError(dotted(item["loc"]), str(item["msg"]).removeprefix("Value error, "))
                    for item in error.errors()
                ]
        raise FileError(self._source, self._mistakes)


def spec_of(config: Mapping[str, Any], source: str) -> FamilySpec:
    """Return the model's spec from the values of a config.json.

    Args:
        source: path of the file, for errors.

    Raises:
        FileError: the architecture is unknown, or keys have values that hpctrain's models lack; all are listed.
    """
    name = architecture(config, source)
    keys = _Keys(config, source)
    return _READERS[name](keys)


def architecture(config: Mapping[str, Any], source: str) -> str:
    """Return the name of the class with which transformers loads the folder of a config.json.

    Args:
        source: path of the file, for errors.

    Raises:
        FileError: hpctrain does not support the class.
    """
    named, kind = config.get("architectures"), config.get("model_type")
    if not named and isinstance(kind, str) and kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) and named[0] in _READERS:
        return str(named[0])
    text = f"found {_short_repr(named)} (model_type {_short_repr(kind)}); allowed: {', '.join(_READERS)}"
    raise FileError(source, [FieldError("architectures", text)])


def dropout_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json with a dropout above 0, each with its value, as 'resid_pdrop 0.1'. hpctrain's
    models have no dropout."""
    rates = [(key, config.get(key)) for key in _DROPOUT]
    return [f"{key} {value:g}" for key, value in rates if isinstance(value, int | float) and value > 0]


def _decoder(keys: _Keys) -> FamilySpec:
    sizes = keys.sizes(**_SIZES)
    keys.only("head_dim", None, sizes["dim"] // sizes["heads"])
    keys.only("hidden_act", "silu", "swish", default="silu")
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False, default=False)
    return keys.build_spec(
        DecoderSpec,
        **sizes,
        kv_heads=keys.size("num_key_value_heads", sizes["heads"]),
        tied=keys.flag("tie_word_embeddings", False),
        rope_base=_rope_base(keys),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        init_std=keys.number("initializer_range", 0.02),
    )


def _mistral(keys: _Keys) -> FamilySpec:
    """Return the spec of a Mistral without a sliding attention window, which is that of a Llama. A window is refused,
    and so is a missing key `sliding_window`, because transformers then assumes a window of 4096 tokens."""
    keys.only("sliding_window", None, default=4096)
    keys.size("num_key_value_heads")  # absent it would be 8 here, not all heads
    return _decoder(keys)


def _rope_base(keys: _Keys) -> float:
    """Return the base of the rotary position angles: from `rope_theta` in `rope_parameters` (transformers 5) or
    `rope_scaling`, else from the key `rope_theta` itself, else 10,000."""
    for key in ("rope_parameters", "rope_scaling"):
        parameters = keys.get(key)
        if isinstance(parameters, dict):
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind != "default" or parameters.get("partial_rotary_factor", 1.0) != 1.0:
                keys.refuse(key, "null, or rope_type default")
            elif parameters.get("rope_theta") is not None:
                return keys.number(key, 1.0, "rope_theta")
    return keys.number("rope_theta", 10_000.0)


def _gpt2(keys: _Keys) -> FamilySpec:
    sizes = keys.sizes(dim="n_embd", layers="n_layer", heads="n_head", vocab="vocab_size")
    keys.only("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    keys.only("scale_attn_weights", True, default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        keys.only(key, False, default=False)
    return keys.build_spec(
        Gpt2Spec,
        **sizes,
        ffn_dim=keys.size("n_inner", 4 * sizes["dim"]),
        positions=keys.size("n_positions", 1024),
        tied=keys.flag("tie_word_embeddings", True),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        init_std=keys.number("initializer_range", 0.02),
    )


def _encoder(keys: _Keys) -> FamilySpec:
    keys.only("hidden_act", "gelu", default="gelu")
    keys.only("position_embedding_type", "absolute", default="absolute")
    keys.only("type_vocab_size", SEGMENTS, default=SEGMENTS)
    for key in ("is_decoder", "add_cross_attention"):
        keys.only(key, False, default=False)
    return keys.build_spec(
        EncoderSpec,
        **keys.sizes(**_SIZES),
        positions=keys.size("max_position_embeddings", 512),
        tied=keys.flag("tie_word_embeddings", True),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        init_std=keys.number("initializer_range", 0.02),
    )


def _encoder_decoder(keys: _Keys) -> FamilySpec:
    encoders = keys.size("num_layers")
    form = keys.only("feed_forward_proj", "relu", "gated-gelu", default="relu")
    return keys.build_spec(
        EncoderDecoderSpec,
        layers=encoders + keys.size("num_decoder_layers", encoders),
        encoder_layers=encoders,
        **keys.sizes(dim="d_model", heads="num_heads", head_dim="d_kv", ffn_dim="d_ff", vocab="vocab_size"),
        gated=form == "gated-gelu",
        # transformers 5 marks every T5 as tied; the former meaning of the key is in scale_decoder_outputs.
        tied=keys.flag("tie_word_embeddings", True) and keys.flag("scale_decoder_outputs", True),
        buckets=keys.size("relative_attention_num_buckets", 32),
        max_distance=keys.size("relative_attention_max_distance", 128),
        norm_eps=keys.number("layer_norm_epsilon", 1e-6),
    )


_READERS: dict[str, Callable[[_Keys], FamilySpec]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _mistral,
    "GPT2LMHeadModel": _gpt2,
    "BertForMaskedLM": _encoder,
    "BertForPreTraining": _encoder,
    "T5ForConditionalGeneration": _encoder_decoder,
}


def _short_repr(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def config_of(spec: FamilySpec, seq_len: int, special: SpecialTokens) -> dict[str, Any]:
    """Return the values of a config.json for a model that was initialized from the run's seed, not from a Hugging Face
    folder.

    Args:
        seq_len: tokens in a training sequence. A model without a table of positions gets it as its maximum length.
        special: special tokens of the run's objective.
    """
    match spec:
        case DecoderSpec():
            return {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": spec.vocabulary,
                "hidden_size": spec.dim,
                "intermediate_size": spec.hidden,
                "num_hidden_layers": spec.layers,
                "num_attention_heads": spec.heads,
                "num_key_value_heads": spec.key_value_heads,
                "head_dim": spec.head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": seq_len,
                "initializer_range": spec.init_std,
                "rms_norm_eps": spec.norm_eps,
                "rope_theta": spec.rope_base,
                "rope_scaling": None,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "mlp_bias": False,
                "tie_word_embeddings": spec.tied,
                "bos_token_id": None,
                "eos_token_id": special.end_of_text,
                "pad_token_id": None,
            }
        case Gpt2Spec():
            return {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": spec.vocabulary,
                "n_positions": spec.positions,
                "n_embd": spec.dim,
                "n_layer": spec.layers,
                "n_head": spec.heads,
                "n_inner": spec.hidden,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "layer_norm_epsilon": spec.norm_eps,
                "initializer_range": spec.init_std,
                "tie_word_embeddings": spec.tied,
                "bos_token_id": special.end_of_text,
                "eos_token_id": special.end_of_text,
            }
        case EncoderSpec():
            return {
                "architectures": ["BertForMaskedLM"],
                "model_type": "bert",
                "vocab_size": spec.vocabulary,
                "hidden_size": spec.dim,
                "num_hidden_layers": spec.layers,
                "num_attention_heads": spec.heads,
                "intermediate_size": spec.hidden,
                "hidden_act": "gelu",
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "max_position_embeddings": spec.positions,
                "type_vocab_size": SEGMENTS,
                "initializer_range": spec.init_std,
                "layer_norm_eps": spec.norm_eps,
                "position_embedding_type": "absolute",
                "tie_word_embeddings": spec.tied,
                "pad_token_id": None,
            }
        case EncoderDecoderSpec():
            return {
                "architectures": ["T5ForConditionalGeneration"],
                "model_type": "t5",
                "is_encoder_decoder": True,
                "vocab_size": spec.vocabulary,
                "d_model": spec.dim,
                "d_kv": spec.head_width,
                "d_ff": spec.hidden,
                "num_layers": spec.seam,
                "num_decoder_layers": spec.layers - spec.seam,
                "num_heads": spec.heads,
                "relative_attention_num_buckets": spec.buckets,
                "relative_attention_max_distance": spec.max_distance,
                "dropout_rate": 0.0,
                "layer_norm_epsilon": spec.norm_eps,
                "feed_forward_proj": "gated-gelu" if spec.gated else "relu",
                "tie_word_embeddings": spec.tied,
                "pad_token_id": special.start,
                "decoder_start_token_id": special.start,
                "eos_token_id": special.end_of_text,
            }


def continued_config(recorded: Mapping[str, Any], spec: FamilySpec, seq_len: int) -> dict[str, Any]:
    """Return the values of a config.json for a run that started from a Hugging Face folder: those of that folder,
    changed where the run's weights need another value.

    Args:
        recorded: values of the folder's config.json, as the run recorded them.
        spec: the spec of the run's model.
        seq_len: tokens in a training sequence; a Llama's maximum length becomes at least that.
    """
    config = {key: value for key, value in recorded.items() if key not in ("transformers_version", "dtype")}
    if config.get("architectures") == ["BertForPreTraining"]:
        config["architectures"] = ["BertForMaskedLM"]  # its other head was not trained
    if isinstance(spec, EncoderDecoderSpec) and not spec.tied:
        # By this key transformers 5 recognizes a T5 without scaling; it scales the one that it wrote itself.
        config["tie_word_embeddings"] = False
    if isinstance(spec, DecoderSpec):
        config["max_position_embeddings"] = max(seq_len, config.get("max_position_embeddings") or 0)
    return config
