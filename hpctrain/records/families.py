"""The families of models that this package builds, as `model.dims` of a run file names them."""

from __future__ import annotations

from hpctrain.records.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.encoder_spec import EncoderSpec
from hpctrain.records.gpt2_spec import Gpt2Spec
from hpctrain.records.model_spec import ModelSpec

FamilySpec = ModelSpec | Gpt2Spec | EncoderSpec | EncoderDecoderSpec
"""Told apart by `family`; without one it is the decoder."""
