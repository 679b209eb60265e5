"""manifest.json of a checkpoint: the list of its files, so that only files that this run wrote are opened."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_name import CheckpointName


class FileEntry(Part):
    """One file of a checkpoint."""

    name: CheckpointName
    size_bytes: int = Field(ge=0)
    sha256: str


class LossScale(Part):
    """Factor on the loss in fp16 (Micikevicius et al. 2018, section 3.2)."""

    value: float = Field(default=2.0**16, ge=1)
    """A power of two, so that scaling rounds nothing."""
    good_steps: int = Field(default=0, ge=0)
    """Steps without overflow since the factor last changed."""
    skipped: int = Field(default=0, ge=0)
    """Steps of the run that overflowed and changed no weight."""

    def after_good_step(self) -> LossScale:
        """Return the scale after a step without overflow: doubled every `GROWTH_INTERVAL` steps, to `LARGEST_SCALE`."""
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return self.model_copy(update={"good_steps": self.good_steps + 1})
        return self.model_copy(update={"value": min(2 * self.value, LARGEST_SCALE), "good_steps": 0})

    def after_overflow(self) -> LossScale:
        """Return the scale after an overflow: halved, but at least 1; the step counts as skipped."""
        value = max(self.value / 2, 1.0)
        return self.model_copy(update={"value": value, "good_steps": 0, "skipped": self.skipped + 1})


GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24


class Manifest(Document):
    """Everything in a checkpoint that is not a tensor."""

    schema_kind: ClassVar[str] = "manifest"

    step: int = Field(ge=0)
    """Optimizer steps done when the checkpoint was saved."""
    generation: int
    """Generation that wrote the checkpoint."""
    samples: int = Field(ge=0)
    """Sequences consumed; the sampler continues there."""
    seed: int
    run_sha256: str
    """Content hash of the resolved run file."""
    model_sha256: str
    """Content hash of the model's dimensions: a checkpoint of another model is refused."""
    world_size: int
    """Number of processes that wrote the checkpoint; any number can read it."""
    loss_scale: LossScale | None = None
    """State of the loss scale; only with precision fp16."""
    reduction_sha256: str | None = None
    """Hash of the parts of the plan that decide what state each rank's gradient reducer has between steps; absent where
    reducers have none. A run whose plan has another hash cannot restore that state."""
    files: list[FileEntry]
