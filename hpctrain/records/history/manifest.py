"""manifest.json of a checkpoint: names, sizes and hashes of its files, so that a worker opens no other files, and the
part of the state that is not in tensors."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_name import CheckpointName


class FileEntry(Part):
    """One file of a checkpoint, with its name, size and hash."""

    name: CheckpointName
    """Name of the file within the checkpoint's folder."""
    size_bytes: int = Field(ge=0)
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 of the file in hexadecimal digits."""


class LossScale(Part):
    """The loss scale, a factor on the loss in fp16 (Micikevicius et al. 2018, section 3.2), and counts of steps."""

    value: float = Field(default=2.0**16, ge=1)
    """The factor, a power of two, so that scaling rounds nothing."""
    good_steps: int = Field(default=0, ge=0)
    """Steps without overflow in a row: since the last overflow, or since the count last reached `GROWTH_INTERVAL`,
    where it begins again at 0."""
    skipped: int = Field(default=0, ge=0)
    """Steps of the run that overflowed and changed no weight."""

    def after_good_step(self) -> LossScale:
        """Return the loss scale after a step without overflow. The scale doubles after every `GROWTH_INTERVAL` such
        steps in a row, up to `LARGEST_SCALE`."""
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return self.model_copy(update={"good_steps": self.good_steps + 1})
        return self.model_copy(update={"value": min(2 * self.value, LARGEST_SCALE), "good_steps": 0})

    def after_overflow(self) -> LossScale:
        """Return the loss scale after a step whose gradients overflowed: the factor is halved, but at least 1, the
        count of good steps begins again at 0, and the step counts as skipped."""
        value = max(self.value / 2, 1.0)
        return self.model_copy(update={"value": value, "good_steps": 0, "skipped": self.skipped + 1})


GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24


class Manifest(Document):
    """manifest.json of a checkpoint: the list of its files, and the part of the state that is not in tensors."""

    schema_kind: ClassVar[str] = "manifest"

    step: int = Field(ge=0)
    """Optimizer steps done when the checkpoint was saved."""
    generation: int
    """Number of the generation that wrote the checkpoint."""
    samples: int = Field(ge=0)
    """Sequences consumed since the start of the run; the sampler continues with the next one."""
    seed: int
    """Seed of the run."""
    run_sha256: str
    """SHA-256 of the content of the run folder's run.yaml."""
    model_sha256: str
    """SHA-256 of the model's dimensions; a checkpoint of another model is refused."""
    world_size: int
    """Number of processes that wrote the checkpoint; any number can read it."""
    loss_scale: LossScale | None = None
    """The loss scale; only with precision fp16."""
    reduction_sha256: str | None = None
    """SHA-256 of the parts of the plan that decide which state the reducer of each rank keeps between steps. Absent if
    reducers keep none. A run whose plan has another hash cannot restore the state of its reducers."""
    files: list[FileEntry]
    """All files of the checkpoint but the manifest."""
