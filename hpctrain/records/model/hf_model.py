"""What was found in a Hugging Face folder that a run starts from, as the run folder keeps it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.model.families import FamilySpec


class HfModel(Part):
    """A folder's config.json, the dimensions in it, and which weights lay beside it."""

    config: dict[str, Any]
    """The folder's config.json as it was: an export goes on from it."""
    dims: Annotated[FamilySpec, Field(discriminator="family")]
    """What it says, in our words."""
    weights_sha256: str
    """Hash of the names, types, shapes and first numbers of all tensors: the weights have to be these at step 0."""
