"""The model families that hpctrain builds, as `model.dims` of a run file names them."""

from __future__ import annotations

from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.encoder_spec import EncoderSpec
from hpctrain.records.model.gpt2_spec import Gpt2Spec

FamilySpec = DecoderSpec | Gpt2Spec | EncoderSpec | EncoderDecoderSpec
"""Dimensions of one family; `family` says which, by default the decoder."""
