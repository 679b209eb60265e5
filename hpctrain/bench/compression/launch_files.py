"""What one launch of the bench measures, and what comes back: two files between the bench and its processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import write_json
from hpctrain.records.model.decoder_spec import DecoderSpec

SCENE_FILE, SAMPLES_FILE = "scene.json", "samples.json"
BENCH_SPEC = DecoderSpec(layers=6, dim=384, heads=6, vocab=320)
"""10.87 M parameters, tokens are bytes."""


@dataclass(frozen=True)
class LaunchSettings:
    """How long and on what."""

    steps: int = 20
    """Measured of each method."""
    block_steps: int = 2
    """Steps that one method makes before it is the next one's turn."""
    warm_steps: int = 5
    """Unmeasured, of each method; those that start densely do so in the first of them."""
    rows: int = 1
    """Sequences of a process in a step."""
    seq_len: int = 64
    lr: float = 0.1
    """Of plain SGD: fifteen models with AdamW's moments would not fit into the memory of a small machine."""
    seed: int = 1
    spec: DecoderSpec = BENCH_SPEC

    @property
    def dense_steps(self) -> int:
        return max(1, self.warm_steps - 2)


def as_json(settings: LaunchSettings) -> dict[str, Any]:
    """The settings as plain values."""
    return asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)}


@dataclass(frozen=True)
class LaunchSpec:
    """One launch: these methods in turns on so many nodes."""

    nodes: int
    interface: str
    """Whose counters are read and which the messages go through."""
    methods: tuple[str, ...]
    settings: LaunchSettings

    def write(self, folder: Path) -> None:
        write_json(folder / SCENE_FILE, asdict(self) | {"settings": as_json(self.settings)})

    @classmethod
    def read(cls, folder: Path) -> LaunchSpec:
        value = json.loads((folder / SCENE_FILE).read_text())
        settings = value.pop("settings")
        spec = DecoderSpec.model_validate(settings.pop("spec"))
        methods = tuple(value.pop("methods"))
        return cls(methods=methods, settings=LaunchSettings(**settings, spec=spec), **value)


@dataclass(frozen=True)
class Samples:
    """The steps of one method."""

    wall_s: list[float]
    """Of each step, from a common start to the end of the slowest process."""
    cpu_s: list[float]
    """Of each step, mean over the processes."""
    interface_bytes: list[float]
    """Of each step, at a node's interface, mean over the nodes."""
    counted_bytes: float | None
    """A rank's payload in a step by the method's own count, mean; absent where the method does not count."""
    loss: float | None
    """Mean over the validation rows after the last step; absent where it is no finite number."""
    choice: str | None = None
    """The mode that method auto came to."""
    planned_step_s: dict[str, float] | None = None
    """What it expected of a step with each mode, the most exact first."""


@dataclass(frozen=True)
class LaunchResult:
    """What a launch measured."""

    parameters: int
    header_factor: float
    """Bytes at the interface for each byte of payload."""
    samples: dict[str, Samples]
    """By method."""

    def write(self, folder: Path) -> None:
        write_json(folder / SAMPLES_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> LaunchResult:
        value: dict[str, Any] = json.loads((folder / SAMPLES_FILE).read_text())
        samples = {name: Samples(**found) for name, found in value.pop("samples").items()}
        return cls(samples=samples, **value)
