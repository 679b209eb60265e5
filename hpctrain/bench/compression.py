"""`hpctrain bench compression`: what summing gradients costs in time, processor and bytes, method beside method."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.process import Runner
from hpctrain.bench.compression_launch import run_scene
from hpctrain.bench.compression_rank import CORPUS_FOLDER
from hpctrain.bench.compression_scene import Outcome, Samples, Scene, Settings
from hpctrain.bench.compression_traffic import LOOPBACK
from hpctrain.bench.record import make_record
from hpctrain.corpus.found import find_text
from hpctrain.corpus.prepare import Options, prepare
from hpctrain.lab.faults import shape
from hpctrain.lab.layout import NODE_INTERFACE, Layout
from hpctrain.lab.machine import Machine
from hpctrain.records.lab_spec import rate_bits_per_s

TEXT_BYTES = 4_000_000
VALID_FRACTION = 0.02


@dataclass(frozen=True)
class Row:
    """One method on one link."""

    method: str
    link: str
    """The rate its links were shaped to, or 'loopback'."""
    nodes: int
    step_time_s: float
    """Median of the measured steps, the slowest process of each."""
    step_time_low_s: float
    step_time_high_s: float
    """Quartiles."""
    cpu_s: float
    """Median processor seconds of a step and process."""
    bytes_per_parameter: float
    """Sent by a node in a step, as the interface counts it, headers taken off; median."""
    counted_bytes_per_parameter: float | None
    """The same by the method's own count."""
    header_factor: float
    """Bytes at the interface for each byte of payload, measured on this link."""
    own_core_s: float | None
    """`cpu_s` and the time that the interface's bytes take at the link's rate, one after the other: a step of nodes that
    share no processor. Absent on a loopback, which has no rate."""
    loss: float | None
    """On validation text after the last step; absent where it is no finite number."""
    steps: int


@dataclass(frozen=True)
class Place:
    """Where a scene's processes run."""

    link: str
    interface: str
    prefixes: tuple[tuple[str, ...], ...]
    """Of each process: the words before its command."""
    bits_per_s: float | None


def local_place(nodes: int) -> Place:
    """So many processes of this machine, on its loopback."""
    return Place("loopback", LOOPBACK, ((),) * nodes, None)


@contextlib.contextmanager
def lab_place(machine: Machine, layout: Layout, nodes: int, rate: str) -> Iterator[Place]:
    """The first nodes of a lab, their links shaped to a rate meanwhile.

    Raises:
        CommandError: a link cannot be shaped.
    """
    names = layout.names[:nodes]
    prefixes = tuple(("ip", "netns", "exec", layout.namespace(name)) for name in names)
    try:
        shape(machine, layout, names, rate)
        yield Place(rate, NODE_INTERFACE, prefixes, rate_bits_per_s(rate))
    finally:
        for name in names:
            shape(machine, layout, [name], layout.spec.rate_of(layout.node(name)))


@contextlib.contextmanager
def bench_folder() -> Iterator[Path]:
    """A temporary folder with a corpus of the text found on this machine.

    Raises:
        InputError: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        folder = Path(name)
        make_text(folder / CORPUS_FOLDER)
        yield folder


def make_text(folder: Path, limit_bytes: int = TEXT_BYTES) -> None:
    """A corpus of real text, as `hpctrain init` finds it, whose tokens are bytes.

    Raises:
        InputError: there is none.
    """
    found = find_text(limit_bytes)
    prepare(list(found.files), folder, Options(valid_fraction=VALID_FRACTION, limit_bytes=limit_bytes))


def measure_place(
    runner: Runner, place: Place, methods: Sequence[str], settings: Settings, folder: Path
) -> tuple[list[Row], Outcome]:
    """All methods in turns in one launch; a row for each, and the samples behind them.

    Raises:
        CommandError: a process failed.
    """
    scene = Scene(len(place.prefixes), place.interface, tuple(methods), settings)
    outcome = run_scene(runner, scene, folder, place.prefixes)
    return [_row(name, place, outcome, outcome.samples[name]) for name in methods], outcome


def record(rows: Sequence[Row], settings: Settings, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The machine form, with machine and versions."""
    return make_record("compression", rows, asdict(settings) | {"spec": settings.spec.model_dump(exclude_none=True)})


def _row(name: str, place: Place, outcome: Outcome, samples: Samples) -> Row:
    low, middle, high = np.percentile(samples.wall_s, [25, 50, 75])
    cpu_s, sent = float(np.median(samples.cpu_s)), float(np.median(samples.interface_bytes))
    return Row(
        method=name,
        link=place.link,
        nodes=len(place.prefixes),
        step_time_s=float(middle),
        step_time_low_s=float(low),
        step_time_high_s=float(high),
        cpu_s=cpu_s,
        bytes_per_parameter=sent / outcome.header_factor / outcome.parameters,
        counted_bytes_per_parameter=(
            None if samples.counted_bytes is None else samples.counted_bytes / outcome.parameters
        ),
        header_factor=outcome.header_factor,
        own_core_s=None if place.bits_per_s is None else cpu_s + 8 * sent / place.bits_per_s,
        loss=samples.loss,
        steps=len(samples.wall_s),
    )
