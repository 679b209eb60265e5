"""What hpctrain read from a Hugging Face model folder, as the run folder's run.yaml keeps it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.transformers_spec import TransformersSpec

HfSpec = FamilySpec | TransformersSpec
"""Specification of any model that a Hugging Face folder can hold."""


class HfModel(Part):
    """What hpctrain read from a Hugging Face model folder: config.json, the model's dimensions, and a hash of the
    weights."""

    config: dict[str, Any]
    """The folder's config.json, unchanged; `hpctrain export` writes one based on it."""
    dims: Annotated[HfSpec, Field(discriminator="family")]
    """The model's dimensions as read from config.json. For a model that transformers builds: its parts, its tensors and
    its measured sizes."""
    weights_sha256: str
    """SHA-256 of names, types, shapes and first bytes of all tensors. The run refuses to start from other weights."""

    @property
    def spec(self) -> HfSpec:
        """Return the model's specification, from which workers can build it."""
        if isinstance(self.dims, TransformersSpec):
            return self.dims.model_copy(update={"config": self.config})
        return self.dims
