"""manifest.json of a checkpoint: what lies in it, so that nothing is opened that was not written by this run."""

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
    """What the loss is multiplied by in fp16 (Micikevicius et al. 2018, section 3.2)."""

    value: float = Field(default=2.0**16, ge=1)
    """A power of two, so that scaling rounds nothing."""
    good_steps: int = Field(default=0, ge=0)
    """Steps without overflow since it last changed."""
    skipped: int = Field(default=0, ge=0)
    """Steps of the run that overflowed and changed no weight."""

    def after_good_step(self) -> LossScale:
        """Doubled after `GROWTH_INTERVAL` good steps, up to `LARGEST_SCALE`."""
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return self.model_copy(update={"good_steps": self.good_steps + 1})
        return self.model_copy(update={"value": min(2 * self.value, LARGEST_SCALE), "good_steps": 0})

    def after_overflow(self) -> LossScale:
        """Halved, down to 1; the step counts as skipped."""
        value = max(self.value / 2, 1.0)
        return self.model_copy(update={"value": value, "good_steps": 0, "skipped": self.skipped + 1})


GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24


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
    loss_scale: LossScale | None = None
    """With precision fp16."""
    reduction_sha256: str | None = None
    """Where reducers keep something from step to step: of the plan, all that decides what each rank keeps. Ranks of a
    plan with another one cannot use it."""
    files: list[FileEntry]
