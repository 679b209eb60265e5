"""The two files between the bench and its processes: what one launch measures, and what it returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hpctrain.base.atomic import write_json
from hpctrain.records.model.families import DecoderSpec

SCENE_FILE, SAMPLES_FILE = "scene.json", "samples.json"
BENCH_SPEC = DecoderSpec(layers=6, dim=384, heads=6, vocab=320)
"""A model of 10.87 M parameters, whose tokens are bytes."""


@dataclass(frozen=True)
class LaunchSettings:
    """Number of steps, batch and optimizer of a launch."""

    steps: int = 20
    """Measured steps of each method."""
    block_steps: int = 2
    """Steps that one method makes before the next one's turn."""
    warm_steps: int = 5
    """Steps of each method before the measured ones; methods with dense steps make them among these."""
    rows: int = 1
    """Sequences of a process in a step."""
    seq_len: int = 64
    lr: float = 0.1
    """Learning rate of plain SGD. AdamW's moments for fifteen models would not fit into a small machine's memory."""
    seed: int = 1
    spec: DecoderSpec = BENCH_SPEC

    @property
    def dense_steps(self) -> int:
        return max(1, self.warm_steps - 2)


def as_json(settings: LaunchSettings) -> dict[str, Any]:
    """Return the settings as JSON values."""
    return asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)}


@dataclass(frozen=True)
class LaunchSpec:
    """One launch: the methods that it measures in turns, and its number of nodes."""

    nodes: int
    interface: str
    """Network interface that carries the messages and whose counters are read."""
    methods: tuple[str, ...]
    settings: LaunchSettings

    def write(self, folder: Path) -> None:
        write_json(folder / SCENE_FILE, asdict(self) | {"settings": as_json(self.settings)})

    @classmethod
    def read(cls, folder: Path) -> LaunchSpec:
        return TypeAdapter(cls).validate_json((folder / SCENE_FILE).read_text())


@dataclass(frozen=True)
class Samples:
    """The measured steps of one method."""

    wall_s: list[float]
    """Wall time of each step, from a common start to the end of the slowest process."""
    cpu_s: list[float]
    """Processor time of each step, mean over the processes."""
    interface_bytes: list[float]
    """Bytes of each step at a node's interface, mean over the nodes."""
    counted_bytes: float | None
    """Payload bytes of a rank in a step by the method's own count, mean; None where the method does not count."""
    loss: float | None
    """Mean over the validation sequences after the last step; None where it is infinite or NaN."""
    choice: str | None = None
    """The mode that method auto chose."""
    planned_step_s: dict[str, float] | None = None
    """Predicted step time of method auto for each mode, the least lossy mode first."""


@dataclass(frozen=True)
class LaunchResult:
    """The measurements of a launch."""

    parameters: int
    header_factor: float
    """Bytes at the interface for each byte of payload."""
    samples: dict[str, Samples]
    """Samples by method."""

    def write(self, folder: Path) -> None:
        write_json(folder / SAMPLES_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> LaunchResult:
        return TypeAdapter(cls).validate_json((folder / SAMPLES_FILE).read_text())
