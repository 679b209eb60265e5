"""manifest.json of a checkpoint: what lies in it, so that nothing is opened that was not written by this run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpctrain.records.document import Document, Part


class FileEntry(Part):
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(Document):
    """Everything about a checkpoint that is no tensor."""

    schema_kind: ClassVar[str] = "manifest"

    step: int = Field(ge=0)
    """Steps done."""
    generation: int
    """Generation that wrote it."""
    samples: int = Field(ge=0)
    """Sequences consumed: where the sampler goes on."""
    seed: int
    run_sha256: str
    """Content hash of the resolved run file."""
    model_sha256: str
    """Content hash of the model's dimensions: a checkpoint of another model is refused."""
    world_size: int
    """Processes that wrote it; any number can read it."""
    files: list[FileEntry]
