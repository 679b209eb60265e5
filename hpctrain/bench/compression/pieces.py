"""Measures the parts of a codec on a CPU or a GPU: selection of the largest values of a gradient and their encoding,
and, on a CPU, encoding and decoding of integers. The times of the selections are compared with the time of
`torch.topk`."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import format_bytes
from hpctrain.compress.build import build_block_code
from hpctrain.compress.codecs.sparse_message import ValueCode, decode, encode
from hpctrain.compress.select.selectors import by_torch, select, select_with_values, threshold_select
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.rotated import RotatedIntegers

NUMBERS = 30_000_000
"""Number of values in the gradient that is measured on a CPU."""
DENSITIES = (0.01, 0.07, 0.1)
Work = Callable[[], object]
GPU_NUMBERS = 2**28
"""Number of values in the gradient that is measured on a GPU. In fp32 they take 1 GiB, far more than any cache
holds."""
_COPY = "copy"


@dataclass(frozen=True)
class PieceRow:
    """Result of one part of a codec on a CPU: the median time over the repeats, with the shortest and the longest.
    `density` is the share of the values that was requested, `chosen` the share that was selected."""

    piece: str
    """Name of the part, such as 'select exact'."""
    density: float
    """Share of the values that was requested."""
    chosen: float
    """Share of the values that was selected."""
    cpu_ns_per_number: float
    """Processor nanoseconds for each value of the gradient, sent or not, on one thread; median over the repeats."""
    low_ns: float
    high_ns: float
    """`low_ns` and `high_ns`: nanoseconds per value of the shortest and of the longest repeat."""
    bytes_per_number: float | None
    """Bytes of the message per value of the gradient; None where the part neither writes nor reads a message."""


def measure_pieces(
    densities: Sequence[float] = DENSITIES, numbers: int = NUMBERS, repeats: int = 5, seed: int = 1
) -> list[PieceRow]:
    """Return the measurements of each part of a sparse codec on a CPU at each density: top-k of torch, selections,
    encoding and decoding; then those of integers. All parts get `numbers` normally distributed values, as large as
    small gradients."""
    torch.set_num_threads(1)
    values = torch.randn(numbers, generator=torch.Generator().manual_seed(seed)).mul_(1e-5)
    sparse = [row for density in densities for row in _cpu_rows(density, values, repeats)]
    return sparse + _integer_rows(values, repeats)


def _integer_rows(values: Tensor, repeats: int) -> list[PieceRow]:
    """Return the measurements of encoding and decoding with each mode of integers. If the mode keeps rounding errors,
    encoding includes writing them in place of the numbers."""
    works: dict[str, Work] = {}
    in_message: dict[str, float] = {}
    for mode in (*Quantized.modes(), *RotatedIntegers.modes()):
        codec = make_codec({"mode": mode})
        assert isinstance(codec, Quantized | RotatedIntegers)
        code = build_block_code(codec)
        numbers = values[: values.numel() // code.part_multiple * code.part_multiple]
        message = torch.empty(code.bytes_of(numbers.numel()), dtype=torch.uint8)
        # Rounding errors take the place of the numbers, so each repeat encodes other ones.
        works[f"encode {mode}"] = functools.partial(code.write, numbers.clone(), message, codec.has_state)
        works[f"decode {mode}"] = functools.partial(code.read, message, torch.empty_like(numbers))
        in_message |= dict.fromkeys((f"encode {mode}", f"decode {mode}"), codec.dense_bytes)
    times = in_turns(works, repeats, _processor_seconds)
    ns = {name: [1e9 * second / values.numel() for second in seconds] for name, seconds in times.items()}
    return [
        PieceRow(name, 1.0, 1.0, statistics.median(ns[name]), min(ns[name]), max(ns[name]), in_message[name])
        for name in works
    ]


def _cpu_rows(density: float, values: Tensor, repeats: int) -> list[PieceRow]:
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
    """Return name of a piece of work -> its seconds, one for each repeat. The pieces take turns, so that noise of the
    machine affects all of them alike.

    Args:
        seconds_of: runs a piece of work and returns its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(seconds_of(work))
    return seconds


def _processor_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@dataclass(frozen=True)
class GpuPieceRow:
    """Time of one part of a codec on a GPU, such as the selection: `time_s` is the median over the repeats. `density`
    is the share of the values that was requested, `chosen` the share that was selected. `share_of_copy` is the time to
    copy the gradient divided by `time_s`."""

    piece: str
    density: float
    """Share of the values that was requested."""
    chosen: float
    """Share of the values that was selected; for a copy, 1."""
    time_s: float
    """Seconds between two events on the device; host work counts where the device waits for it."""
    low_s: float
    high_s: float
    """`low_s` and `high_s`: the shortest and the longest of the repeats."""
    bytes_per_s: float
    """Bytes of the gradient divided by `time_s`; each byte counts once, however often it is read."""
    share_of_copy: float
    """Time of the copy divided by `time_s`: the share of the copy's bandwidth, for a part that moves as many bytes. A
    copy reads and writes each byte of the gradient once; a selection in two passes reads each byte twice. The output of
    a selection, 12 bytes per selected value, is not counted."""


def measure_on_gpu(
    densities: Sequence[float] = DENSITIES, numbers: int = GPU_NUMBERS, repeats: int = 5, seed: int = 1
) -> tuple[str, list[GpuPieceRow]]:
    """Return the name of the current GPU, and the measurements of each part of a sparse codec at each density (copy,
    top-k of torch, selections) on `numbers` normally distributed values.

    Raises:
        HpctrainError: the GPU has too little memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    free = torch.cuda.mem_get_info(device)[0]
    try:
        values = torch.randn(numbers, device=device, generator=torch.Generator(device).manual_seed(seed)).mul_(1e-5)
        return name, measure_pieces_of(values, densities, repeats, event_seconds)
    except torch.OutOfMemoryError:
        raise HpctrainError(
            f"--device cuda: {name} had {format_bytes(free)} of memory free, which is too little for numbers of "
            f"{format_bytes(4 * numbers)}, their copy and a top-k of them; end what runs there, or --device cpu"
        ) from None


def measure_pieces_of(
    values: Tensor, densities: Sequence[float], repeats: int, seconds_of: Callable[[Work], float]
) -> list[GpuPieceRow]:
    """Return the measurements of each part of a sparse codec (copy, top-k of torch, selections) on `values` at each
    density.

    Args:
        values: gradient [n], fp32, contiguous.
        densities: shares of the values to select.
        repeats: counted repeats, after one warm-up.
        seconds_of: runs a piece of work and returns its seconds.
    """
    return [row for density in densities for row in _gpu_rows(density, values, repeats, seconds_of)]


def event_seconds(work: Work) -> float:
    """Run the work on the current CUDA stream, and return the seconds between two events, one before and one after
    it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _gpu_rows(density: float, values: Tensor, repeats: int, seconds_of: Callable[[Work], float]) -> list[GpuPieceRow]:
    n = values.numel()
    k = max(1, round(density * n))
    target = torch.empty_like(values)
    chosen = select_with_values(values, k, "sampled")[1]
    threshold = chosen.abs().min()
    share = chosen.numel() / n
    works: dict[str, tuple[Work, float]] = {
        _COPY: (lambda: target.copy_(values), 1.0),
        "torch.topk": (lambda: values.abs().topk(k, sorted=False), k / n),
        "select sampled": (lambda: select_with_values(values, k, "sampled"), share),
        "selection pass of torch's operations": (lambda: by_torch(values, threshold), share),
    }
    find = threshold_select(values.device)
    if find is not by_torch:
        works["selection pass of our kernels"] = (lambda: find(values, threshold), share)
    # One uncounted warm-up: kernels are compiled, and memory is allocated.
    times = in_turns({name: work for name, (work, _) in works.items()}, repeats + 1, seconds_of)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return [
        GpuPieceRow(
            name, density, of_all, medians[name], min(times[name][1:]), max(times[name][1:]),
            values.nbytes / medians[name], medians[_COPY] / medians[name],
        )
        for name, (_, of_all) in works.items()
    ]  # fmt: skip
