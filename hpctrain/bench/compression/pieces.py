"""Processor time to select and encode the largest values of a gradient on a CPU, compared with torch's top-k."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import ValueCode, decode, encode
from hpctrain.compress.select.selectors import select

NUMBERS = 30_000_000
DENSITIES = (0.01, 0.07, 0.1)
Work = Callable[[], object]


@dataclass(frozen=True)
class PieceRow:
    """Result of one part of a codec at one density: the median over the repeats. The parts are measured in turns."""

    piece: str
    density: float
    """Share of the values that was requested."""
    chosen: float
    """Share of the values that was selected."""
    cpu_ns_per_number: float
    """Processor nanoseconds for each value of the gradient, sent or not, on one thread."""
    low_ns: float
    high_ns: float
    """`low_ns` and `high_ns`: the shortest and the longest of the repeats."""
    bytes_per_number: float | None
    """Bytes of the message per value of the gradient; None where the part neither writes nor reads a message."""


def measure_pieces(
    densities: Sequence[float] = DENSITIES, numbers: int = NUMBERS, repeats: int = 5, seed: int = 1
) -> list[PieceRow]:
    """Return the measurement of each part. All parts get one set of normally distributed values, whose magnitude is
    that of small gradients."""
    torch.set_num_threads(1)
    values = torch.randn(numbers, generator=torch.Generator().manual_seed(seed)).mul_(1e-5)
    return [row for density in densities for row in _at(density, values, repeats)]


def _at(density: float, values: Tensor, repeats: int) -> list[PieceRow]:
    numbers = values.numel()
    k = round(density * numbers)
    positions = select(values, k, "sampled")
    message = encode(positions, values[positions], numbers, ValueCode.BF16)
    in_message = message.numel() / numbers
    works: dict[str, tuple[Work, float, float | None]] = {
        "torch.topk": (lambda: values.abs().topk(k, sorted=False), k / numbers, None),
        "select exact": (lambda: select(values, k, "exact"), k / numbers, None),
        "select sampled": (lambda: select(values, k, "sampled"), positions.numel() / numbers, None),
        "select block": (lambda: select(values, k, "block"), select(values, k, "block").numel() / numbers, None),
        "gather and encode bf16": (
            lambda: encode(positions, values[positions], numbers, ValueCode.BF16),
            positions.numel() / numbers,
            in_message,
        ),
        "decode bf16": (lambda: decode(message, numbers), positions.numel() / numbers, in_message),
    }
    seconds = in_turns({name: work for name, (work, _chosen, _bytes) in works.items()}, repeats, _processor_seconds)
    ns = {name: [1e9 * second / numbers for second in times] for name, times in seconds.items()}
    return [
        PieceRow(name, density, chosen, statistics.median(ns[name]), min(ns[name]), max(ns[name]), sent)
        for name, (_work, chosen, sent) in works.items()
    ]


def in_turns(works: Mapping[str, Work], repeats: int, seconds_of: Callable[[Work], float]) -> dict[str, list[float]]:
    """Return the seconds of each piece of work, one for each repeat. The pieces take turns, so that noise of the
    machine affects all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(seconds_of(work))
    return seconds


def _processor_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
