"""Reads the config.json of a Hugging Face folder into a model's spec (`records/model/families.py`), and writes a
config.json from a spec, by the table of architectures. Pure; tensors are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.architecture import Architecture
from hpctrain.hf.architectures import ARCHITECTURES
from hpctrain.hf.config_keys import ConfigKeys, short_repr
from hpctrain.hf.settings import effective
from hpctrain.hf.transformers_row import transformers_row
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, FamilySpec, Gpt2Spec
from hpctrain.records.model.hf_model import HfModel, HfSpec
from hpctrain.records.model.transformers_spec import TransformersSpec

CONFIG_NAME = "config.json"


def architecture(config: Mapping[str, Any], source: str) -> Architecture:
    """Return the row of the class with which transformers loads the folder of a config.json.

    Args:
        source: path of the file, for errors.

    Raises:
        FileError: hpctrain does not support the class, or `architectures` and `model_type` contradict each other.
    """
    named, kind = config.get("architectures"), config.get("model_type")
    if not named and isinstance(kind, str):
        for row in ARCHITECTURES.values():
            if row.model_type == kind:
                return row
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) and named[0] in ARCHITECTURES:
        row = ARCHITECTURES[named[0]]
        if kind not in (None, row.model_type):
            text = f"found {short_repr(kind)}; allowed: {row.model_type}, as architectures says; correct one of the two"
            raise FileError(source, [FieldError("model_type", text)])
        return row
    names = ", ".join(ARCHITECTURES)
    text = f"found {short_repr(named)} (model_type {short_repr(kind)}); allowed: {names}; name a folder of such a model"
    raise FileError(source, [FieldError("architectures", text)])


def architecture_of(hf_model: HfModel) -> Architecture:
    """Return the row of the class of a folder that hpctrain has read.

    Raises:
        FileError: this version of hpctrain does not support the recorded class.
    """
    if isinstance(hf_model.dims, TransformersSpec):
        return transformers_row(hf_model.dims)
    return architecture(hf_model.config, "model.found.config")


def export_architecture(hf_model: HfModel | None, spec: HfSpec) -> Architecture:
    """Return the row of the class as which a run's model is exported: that of the Hugging Face folder from which the
    run started, else the first in `ARCHITECTURES` that has all settings of the spec.

    Raises:
        InputError: no class has all settings of the spec.
    """
    if hf_model is not None:
        return architecture_of(hf_model)
    assert not isinstance(spec, TransformersSpec), "such a model is that of a folder"
    return architecture_for(spec)


def architecture_for(spec: FamilySpec) -> Architecture:
    """Return the first row in `ARCHITECTURES` whose class has all settings of the spec.

    Raises:
        InputError: no class has all settings of the spec.
    """
    for row in ARCHITECTURES.values():
        if isinstance(spec, row.spec):
            try:
                again = row.read(ConfigKeys(row.write(spec), row.name))
            except FileError:
                continue
            if _values(again) == _values(spec):
                return row
    settings = ", ".join(sorted(spec.to_json().keys() & spec.later_fields))
    raise InputError(f"model.dims: no class of transformers has these settings together: {settings}")


def _values(spec: FamilySpec) -> dict[str, Any]:
    """Return field -> value that the model uses, given or default, for all fields on which weights depend."""
    return {field: effective(spec, field) for field in type(spec).model_fields if field != "decoder_seq"}


def dropout_of(config: Mapping[str, Any]) -> list[str]:
    """Return the dropouts above 0 with which transformers trains the model of a config.json, each with its rate, as
    'resid_pdrop 0.1'. hpctrain's models have no dropout. For an absent key, the rate is the default of transformers.

    Raises:
        FileError: hpctrain does not support the model's class.
    """
    row = architecture(config, "config.json")
    rates = [(key, config.get(key, default)) for key, default in row.dropout.items()]
    return [f"{key} {value:g}" for key, value in rates if isinstance(value, int | float) and value > 0]


def config_of(spec: FamilySpec, seq_len: int, special: SpecialTokens) -> dict[str, Any]:
    """Return the values of a config.json for a model that was initialized from the run's seed, not from a Hugging Face
    folder.

    Args:
        seq_len: tokens in a training sequence; `max_position_embeddings` of a model with rotary positions.
        special: special tokens of the run's objective.

    Raises:
        InputError: no class of transformers has all settings of the spec.
    """
    config = architecture_for(spec).write(spec)
    end = special.end_of_text
    match spec:
        case DecoderSpec():
            tokens = {"bos_token_id": None, "eos_token_id": end}
            return config | {"max_position_embeddings": seq_len, **tokens}
        case Gpt2Spec():
            longest = {} if spec.rotary_dim is None else {"max_position_embeddings": seq_len}
            return config | longest | {"bos_token_id": end, "eos_token_id": end}
        case EncoderSpec():
            return config
        case EncoderDecoderSpec():
            tokens = {"pad_token_id": special.start, "decoder_start_token_id": special.start, "eos_token_id": end}
            return config | tokens


def continued_config(recorded: Mapping[str, Any], spec: HfSpec, seq_len: int) -> dict[str, Any]:
    """Return the values of a config.json for a run that started from a Hugging Face folder: those of that folder,
    changed where the run's weights need another value.

    Args:
        recorded: values of the folder's config.json, as the run recorded them.
        spec: the spec of the run's model.
        seq_len: tokens in a training sequence. With rotary positions without scaling, `max_position_embeddings` becomes
            at least that.
    """
    config = {key: value for key, value in recorded.items() if key not in ("transformers_version", "dtype")}
    if config.get("architectures") == ["BertForPreTraining"]:
        config["architectures"] = ["BertForMaskedLM"]  # its other head was not trained
    if isinstance(spec, EncoderDecoderSpec) and not spec.tied:
        # By this key transformers 5 recognizes a T5 without scaling; it scales the one that it wrote itself.
        config["tie_word_embeddings"] = False
    rotary = isinstance(spec, Gpt2Spec) and spec.rotary_dim is not None
    if rotary or (isinstance(spec, DecoderSpec) and spec.rope_scaling is None):
        config["max_position_embeddings"] = max(seq_len, config.get("max_position_embeddings") or 0)
    return config
