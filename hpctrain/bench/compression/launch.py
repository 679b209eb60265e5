"""One launch of `hpctrain bench compression`: its settings, its files, and the start and end of its processes.

The processes run on this machine or in the network namespaces of a lab. They read what to measure from one file in the
launch's folder, and rank 0 writes the measurements into another file there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hpctrain.base.atomic import write_json
from hpctrain.base.module_argv import program
from hpctrain.base.process import Runner
from hpctrain.bench.together import run_together
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.gradient_codec import IntraNode

SCENE_FILE, SAMPLES_FILE = "scene.json", "samples.json"
LATE = "_late"
"""End of the name of a method whose sums begin after the pipeline; without it, they begin early."""
BENCH_SPEC = DecoderSpec(layers=6, dim=384, heads=6, vocab=320)
"""The model that the bench trains by default: 10.87 M parameters, tokens are bytes."""


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a launch: batch, learning rate, model and numbers of steps. Each method makes `warm_steps` steps that
    do not count, then `steps` measured ones in blocks of `block_steps`. `rows` are the sequences of a process in a
    step."""

    steps: int = 20
    """Measured steps of each method."""
    block_steps: int = 2
    """Steps that one method makes before the next method makes as many."""
    warm_steps: int = 5
    """Steps of each method before the measured ones. Methods with exact steps at the beginning make these exact steps
    among them."""
    rows: int = 1
    """Sequences of a process in a step."""
    seq_len: int = 64
    lr: float = 0.1
    """Learning rate of plain SGD. The bench does not use AdamW, because its moments for one model per method would not
    fit into a small machine's memory.
    """
    seed: int = 1
    spec: DecoderSpec = BENCH_SPEC

    @property
    def dense_steps(self) -> int:
        """Warm-up steps of the methods that have a warm-up: the first steps, which sum gradients exactly."""
        return max(1, self.warm_steps - 2)


def as_json(settings: LaunchSettings) -> dict[str, Any]:
    """Return the settings as JSON values."""
    return asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)}


@dataclass(frozen=True)
class LaunchSpec:
    """What one launch measures: the methods, which take turns, the number of nodes, and the network interface that
    carries the messages."""

    nodes: int
    """Number of nodes."""
    interface: str
    """Network interface that carries the messages and whose counters are read."""
    methods: tuple[str, ...]
    settings: LaunchSettings
    devices: int = 1
    """Number of processes on each node; each holds a replica, or with pipelines a part of one."""

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.nodes * self.devices

    def write(self, folder: Path) -> None:
        write_json(folder / SCENE_FILE, asdict(self) | {"settings": as_json(self.settings)})

    @classmethod
    def read(cls, folder: Path) -> LaunchSpec:
        return TypeAdapter(cls).validate_json((folder / SCENE_FILE).read_text())


@dataclass(frozen=True)
class Samples:
    """The measurements of one method in one launch: lists with a value for each measured step, means, and what the
    planner chose (`choice`, `choice_intra_node`) and predicted (`planned_step_s`) for the method auto."""

    wall_s: list[float]
    """Wall time of each step, from a common start to the end of the slowest process."""
    cpu_s: list[float]
    """CPU time of a process in each step, mean over the processes."""
    interface_bytes: list[float]
    """Bytes that a node's network interface sent in each step, mean over the nodes."""
    counted_bytes: float | None
    """Payload bytes that a rank sends in a step by the method's own count, mean over ranks and steps; None where the
    method does not count."""
    loss: float | None
    """Mean loss on the validation sequences after the last step; None where it is infinite or NaN."""
    choice: str | None = None
    """The codec's mode that the method auto chose; None for other methods."""
    choice_intra_node: IntraNode | None = None
    """How the replicas of a node sum first, where the method auto chose sums by level; None: flat sums, or another
    method."""
    planned_step_s: dict[str, float] | None = None
    """Mode -> step time that the planner predicts for it, for the method auto, in the order in which the planner
    tries modes: none, bf16, int8, int4. None for other methods."""


@dataclass(frozen=True)
class LaunchResult:
    """The measurements of a launch: `samples` has those of each method by name."""

    parameters: int
    """Number of parameters of the model."""
    header_factor: float
    """Bytes that the interface sends for each byte of payload, because of packet headers."""
    samples: dict[str, Samples]
    """Samples by method."""

    def write(self, folder: Path) -> None:
        write_json(folder / SAMPLES_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> LaunchResult:
        return TypeAdapter(cls).validate_json((folder / SAMPLES_FILE).read_text())


def run_scene(runner: Runner, scene: LaunchSpec, folder: Path, prefixes: Sequence[Sequence[str]]) -> LaunchResult:
    """Start a process for each of `prefixes`, wait for all, and return what they measured.

    When one process fails, the others are killed, because they would wait for it forever. No process outlives this
    call.

    Args:
        scene: what the launch measures.
        folder: holds the corpus; the launch's files, the logs and the file through which the processes meet are written
            there.
        prefixes: for each node the words before a command, which enter the namespace of the node; may be empty.

    Raises:
        CommandError: a process failed; the message has the end of its log.
    """
    (folder / "meeting").unlink(missing_ok=True)
    scene.write(folder)
    commands = [
        [*prefix, *program("hpctrain.bench.compression.rank"), str(folder), str(rank)]
        for rank, prefix in enumerate(prefix for prefix in prefixes for _ in range(scene.devices))
    ]
    run_together(runner, "bench compression", commands, folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    return LaunchResult.read(folder)
