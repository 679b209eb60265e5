"""The model families that hpctrain builds, as `model.dims` of a run file names them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.encoder_spec import EncoderSpec
from hpctrain.records.model.gpt2_spec import Gpt2Spec

FamilySpec = DecoderSpec | Gpt2Spec | EncoderSpec | EncoderDecoderSpec
"""Dimensions of one family; `family` says which, by default the decoder."""


class HfModel(Part):
    """A folder's config.json, the model's dimensions, and a hash of its weights."""

    config: dict[str, Any]
    """The folder's config.json, unchanged; an export is based on it."""
    dims: Annotated[FamilySpec, Field(discriminator="family")]
    """The model's dimensions as read from config.json."""
    weights_sha256: str
    """Hash of names, types, shapes and first bytes of all tensors: the run starts only from these weights."""
