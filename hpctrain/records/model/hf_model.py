"""The content of a Hugging Face folder that a run starts from, as the run folder records it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.model.families import FamilySpec


class HfModel(Part):
    """A folder's config.json, the model's dimensions, and a hash of its weights."""

    config: dict[str, Any]
    """The folder's config.json, unchanged; an export is based on it."""
    dims: Annotated[FamilySpec, Field(discriminator="family")]
    """The model's dimensions as read from it."""
    weights_sha256: str
    """Hash of names, types, shapes and first bytes of all tensors: step 0 accepts only these weights."""
